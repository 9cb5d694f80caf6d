"""Everything the core may ask for, as imperatives. Each docstring says what must precede it.

Every action has a number and ends in exactly one event: `ActionDone`, `ActionFailed` or `ActionUnknown`
(`StartTimer`: in `TimerFired`, or in nothing if a `CancelTimer` came first). `limit` is the time in ns after
which the service reports `ActionUnknown`; an answer after that is ignored by its number.

Carried out by the backend: Wake, Sync, Sleep, Kill, AwaitMemory, Stop. Delivered to the pipeline's client:
Grant, OpenGate, ConfirmRelease, Fail. By the service itself: StartTimer, CancelTimer.
"""

from enum import StrEnum

import msgspec

from core.model import Role


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", omit_defaults=True, gc=False):
    """Base of all actions; `action` is its number, unique within a run."""

    action: int
    limit: int = 0


class Emptying(StrEnum):
    """How an engine gets rid of the requests in flight before it sleeps or syncs."""

    ABORT = "abort"
    DRAIN = "drain"
    KEEP = "keep"
    """In-flight update: nothing is emptied."""


class EngineAction(Action, frozen=True, kw_only=True):
    pipeline: str
    dp_rank: int
    epoch: int
    """The lease under which the engine holds its GPUs. A worker refuses older epochs."""


class WakeEngine(EngineAction, frozen=True, kw_only=True):
    """Bring weights buffers, KV cache and graphs back onto `gpus`. After: every GPU confirmed free. `cold`: the
    process is gone and must be started first. The engine serves nothing until synced and its gate opened."""

    gpus: tuple[int, ...]
    cold: bool = False


class SyncEngine(EngineAction, frozen=True, kw_only=True):
    """Load weights `version` from the cache. After: awake, gate closed, emptied as told (unless KEEP)."""

    version: int
    emptying: Emptying = Emptying.ABORT
    drain: int = 0
    """ns that requests in flight are waited for, at most; then they are aborted."""


class OpenGate(EngineAction, frozen=True, kw_only=True):
    """Tell the pipeline's gateway that the engine serves `version`. After: synced to it."""

    version: int


class SleepEngine(EngineAction, frozen=True, kw_only=True):
    """Close the gate, empty the engine, release its memory down to the residue, acknowledge. The
    acknowledgement is a claim: an `AwaitMemory` follows before anyone else gets the GPUs."""

    emptying: Emptying
    drain: int = 0
    """ns that requests in flight are waited for, at most; then they are aborted."""


class KillEngine(EngineAction, frozen=True, kw_only=True):
    """Kill the engine's whole process tree; requests in flight are lost. An `AwaitMemory` follows."""

    reason: str


class AwaitMemory(Action, frozen=True, kw_only=True):
    """Watch the devices until each GPU shows at least `expect` bytes free, or, once `patience` (ns) has passed, at
    least `need`. At its `limit` the backend itself fails it, saying what it saw. Done: `free` is what each showed.

    `need` is what must be free before anybody else may start there (S2); `expect` is what is free if everybody keeps no
    more than its declared residue. After: the last holder claimed release, or was killed."""

    gpus: tuple[int, ...]
    need: tuple[int, ...]
    expect: tuple[int, ...] = ()
    """Empty: as `need`."""
    patience: int = 0


class StopPipeline(Action, frozen=True, kw_only=True):
    """Kill all workers of a pipeline and drop its weight cache. An `AwaitMemory` follows for what it held."""

    pipeline: str
    reason: str


class Command(Action, frozen=True, kw_only=True):
    """Told to a pipeline's client, and to no other client of that name."""

    pipeline: str
    life: int = 0
    """Which client of that name."""


class GrantLease(Command, frozen=True, kw_only=True):
    """Tell the pipeline that it holds `gpus`. After: every GPU confirmed free. Not delivered: taken back."""

    request: int
    role: Role
    epoch: int
    gpus: tuple[int, ...]


class ConfirmRelease(Command, frozen=True, kw_only=True):
    """Tell the pipeline that its planned release is complete. After: its engines slept, memory seen free."""


class FailPipeline(Command, frozen=True, kw_only=True):
    """Tell the pipeline's client that it has failed and why; its workers are being stopped."""

    reason: str


class StartTimer(Action, frozen=True, kw_only=True):
    """Ring at `at` (ns). A timer of the same name with an older generation is void."""

    timer: str
    generation: int
    at: int


class CancelTimer(Action, frozen=True, kw_only=True):
    """The timer is not needed any more. A ring already under way is ignored by its generation."""

    timer: str
    generation: int


BACKEND = WakeEngine | SyncEngine | SleepEngine | KillEngine | AwaitMemory | StopPipeline
CLIENT = GrantLease | OpenGate | ConfirmRelease | FailPipeline
TIMER = StartTimer | CancelTimer
AnyAction = BACKEND | CLIENT | TIMER


class Note(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", omit_defaults=True, gc=False):
    """What was decided and why, for people, the driver and the monitor; it asks for nothing.

    Kinds: `grant` (a request's GPUs are promised), `expand` and `shrink` (an engine is to wake or sleep),
    `rollout_granted` (a pipeline got its first engine of this wait; its signal is consumed now),
    `init_accepted` (an INITIALIZATION request is queued), `rejected` (a client's mistake; goes to that client only),
    `ignored` (a late or doubled message or outcome), `quarantine`, `residue_growth`, `degraded`, `failed`.
    """

    kind: str
    text: str
    pipeline: str = ""
    dp_rank: int = -1
    gpus: tuple[int, ...] = ()
