"""The plugin interface: what a world must supply, and how it is found by name.

A backend owns time and real things; it holds no scheduler state and takes no scheduling decision. It reports
what happens by calling `emit(event)` (`EngineDied`, `TrainerFailed`, `ClientLost`, `NodeLeft` and telemetry),
from the event loop, never from a thread. All its methods are called on one event loop.

Rules every backend keeps (tests/test_backend_contract.py runs one suite on all of them):

1. `perform` returns exactly one outcome for its action, or is cancelled. It may hang; the service owns limits.
2. A doubled wake (a cold one too), sleep, kill, sync or gate is a no-op that succeeds; so is a doubled onload or
   offload of a trainer.
3. An engine refuses an action with an older epoch than the last one it obeyed, and refuses `generate` unless
   its gate is open: no mistake of a caller makes it serve stale weights.
4. `generate` always ends: completed, aborted (with what was generated so far) or failed.
5. After `close` nothing is left: no process, no task, no memory.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Literal, Protocol

from core import actions, events
from core.errors import ConfigError
from core.model import Record, Role

Emit = Callable[[events.AnyEvent], None]
Outcome = events.ActionDone | events.ActionFailed
MayBegin = Callable[[actions.Action], bool]
Answer = Callable[[actions.Action, Outcome], None]
Phase = Literal["init", "onload", "train", "log_probs", "values", "publish", "offload"]


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time as the backend sees it: virtual or real, integer ns since the run began."""

    def now_ns(self) -> int: ...

    def call_at_ns(self, when_ns: int, callback: Callable[[], None], *, daemon: bool = False) -> Timer:
        """Call back at `when_ns`. `daemon`: not a reason to believe that anything will still happen."""
        ...


class Attempt(Record, frozen=True, kw_only=True):
    """One try at one trajectory, on one engine."""

    pipeline: str
    batch: int
    trajectory: int
    attempt: int
    dp_rank: int
    evaluation: bool = False
    prefix: tuple[tuple[int, int], ...] = ()
    """Segments already generated (weight version, tokens); empty: from the prompt."""


class Generation(Record, frozen=True, kw_only=True):
    """How an attempt ended."""

    status: Literal["completed", "aborted", "failed"]
    segments: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens) including the prefix, oldest first."""
    reason: str = ""
    answered: bool = False
    """With `failed`: the engine did its part, and what failed came after it, such as the reward."""


class Bell(Protocol):
    """What wakes a task that has nothing to do: the part of `anyio.Event` that this takes."""

    def set(self) -> None: ...
    def wait(self) -> Awaitable[object]: ...


class Backend(Protocol):
    """A world the core can drive. Built as `Backend(scenario, **options)`; opening it may take a while."""

    name: str
    clock: Clock
    """There from `open` on."""

    @staticmethod
    def run(main: Callable[[], Awaitable[None]]) -> None:
        """Run `main()` on a fresh event loop of the kind this backend needs."""
        ...

    async def open(self, emit: Emit) -> None:
        """Make the cluster ready. `emit` may be called from now on."""
        ...

    async def close(self) -> None:
        """Stop and free everything, also after a failure, also when called twice."""
        ...

    def carry(self, message: events.Message, deliver: Callable[[events.Message], None]) -> None:
        """Take a client's message to the service: at once, later, twice or never. Never raises."""
        ...

    # --- things that happen by themselves, beside `emit` ----------------------------------------------

    def on_quiescent(self, callback: Callable[[], None]) -> None:
        """Call back when nothing can happen any more. A world that cannot know never does."""
        ...

    def on_kill_client(self, pipeline: str, cancel: Callable[[], None]) -> None:
        """Fault injection: how this pipeline's client is made to vanish without a word."""
        ...

    def on_restart(self, go_down: Callable[[], None], come_back: Callable[[], None]) -> None:
        """Fault injection: how the control plane dies and comes back."""
        ...

    # --- engines, commanded by the scheduler ---------------------------------------------------------

    async def perform(self, action: actions.BACKEND | actions.OpenGate) -> Outcome:
        """Carry out one action of the core."""
        ...

    # A backend whose operations need no tasks may also have
    #
    #     def begin(self, action, may_begin: MayBegin, answer: Answer) -> Callable[[], None]
    #
    # It carries out the action as `perform` does, without anybody waiting: in a later step of the event loop it asks
    # `may_begin(action)`, and if so calls `answer(action, outcome)` once. What it returns gives the answer up.

    # A backend in which commands to a client take time, for the simulation of one where they do, may also have
    #
    #     def command_delay(self, pipeline: str) -> int
    #
    # It says how many ns the next one takes.

    # --- trainers, commanded by the pipeline while it holds the lease ---------------------------------

    async def phase(self, pipeline: str, role: Role, phase: Phase, epoch: int, version: int = -1) -> None:
        """Run one phase of a worker group on its GPUs. `init`: launch and load all of the pipeline's workers,
        engines end asleep. `publish`: put weights `version` into the cache. Raises `OperationFailed`."""
        ...

    # --- rollouts, through the pipeline's gateway ------------------------------------------------------

    def slots(self, pipeline: str) -> int:
        """Requests one engine runs at once; more would queue inside it."""
        ...

    async def generate(self, attempt: Attempt) -> Generation:
        """One trajectory, or the rest of one, on a routable engine. Cancelling it aborts the request."""
        ...

    # A backend whose event loop knows a cheaper way than `anyio.Event` may also have
    #
    #     def bell(self) -> Bell
    #
    # Each is waited for once, by one task, before it rings.


@cache  # reading the entry points of everything installed takes longer than a small run
def load_backend(name: str) -> Callable[..., Backend]:
    """The backend class registered under `name` in the entry-point group `turnstile.backends`.

    Raises ConfigError if there is none, or if its packages are not installed (saying what to install).
    """
    found = {point.name: point for point in entry_points(group="turnstile.backends")}
    if name not in found:
        known = ", ".join(sorted(found)) or "none; is Turnstile installed (pip install -e .)?"
        raise ConfigError("--backend", f"no backend is called {name!r}", f"known: {known}")
    try:
        return found[name].load()
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "--backend", f"{name} needs the package {missing.name!r}, which is not installed",
            f'install it with: pip install "turnstile[{name}]"',
        ) from missing  # fmt: skip
