"""What things took in a recorded run, from its entries alone: one observation each time that something was done.

1. An action lasts from its entry to its outcome, a phase from `PhaseStarted` to `PhaseEnded`; so the way of the message
   is part of it, as it is for everybody who waits. What failed, or never ended, was not measured.
2. Every observation belongs to a process: the first one in each may be another matter than the rest.
3. Emptying an engine is not part of putting it to sleep or syncing it: a drain ends when the engine is idle.
4. A release is measured only where memory was watched because something was let go, and nothing else was given back at
   the same time; that of an initialisation concerns all GPUs of the pipeline, most of which were free already.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from core import actions, events
from core.config import Scenario
from core.model import Priority, Role
from core.trace import Entry, Header
from scenarios.calibration.attempts import Attempts
from scenarios.calibration.memory import MemorySeen

TRAJECTORY = "trajectory"
WARMUP = "warmup"


class Observation(NamedTuple):
    """Something was done once."""

    number: int
    """Of the trajectory's batch; of a phase, how often its worker had done it before."""
    process: str
    """Which process of which worker did it."""
    first: bool
    """It had not done so before."""
    took: int
    """ns."""


class Measured:
    """What the logs show of one pipeline."""

    def __init__(self) -> None:
        self.costs: dict[str, list[Observation]] = {}
        """By key of a scenario's costs."""
        self._done: dict[tuple[str, str], int] = {}
        self.memory = MemorySeen()
        self.started_at: list[int] = []
        """When it first said anything (ns), in each run."""
        self.unexplained = 0
        """Trajectories that came from elsewhere than the reconstruction of the gateway had them."""

    def add(self, cost: str, process: str, took: int, number: int | None = None) -> None:
        before = self._done.get((cost, process), 0)
        self._done[cost, process] = before + 1
        seen = Observation(before if number is None else number, process, not before, took)
        self.costs.setdefault(cost, []).append(seen)


def measure(logs: Iterable[tuple[Header, Iterable[Entry]]]) -> dict[str, Measured]:
    """All logs together, by pipeline. Raises ConfigError if a log is damaged."""
    found: dict[str, Measured] = {}
    for number, (header, entries) in enumerate(logs):
        run = _Run(number, header.config, found)
        for entry in entries:
            run.hear(entry)
        run.finish()
    return found


class _Run:
    """One log."""

    def __init__(self, number: int, scenario: Scenario, found: dict[str, Measured]) -> None:
        self._number = number
        self._own = {job.spec.id: job for job in scenario.jobs}
        self._found = found
        self._attempts = {name: Attempts(job) for name, job in self._own.items()}
        self._phases: dict[tuple[str, Role, str], int] = {}
        self._actions: dict[int, tuple[actions.AnyAction, int]] = {}
        self._let_go: dict[int, str] = {}
        """Who let go of GPUs, by the number of the entry."""
        self._watched: dict[int, str] = {}
        """Whose release an `AwaitMemory` watches, by the action's number."""
        self._lives: dict[tuple[str, int], int] = {}
        """Processes of an engine so far, beyond the first."""
        self._initialising: dict[int, None] = {}
        """Epochs of leases for initialisation."""
        self._requests: dict[tuple[str, int], Priority] = {}
        self._idle_at: dict[tuple[str, int], int] = {}
        self._handlers: dict[type, Callable[[Entry, Any], None]] = {
            events.PhaseStarted: self._phase_started,
            events.PhaseEnded: self._phase_ended,
            events.ActionDone: self._done,
            events.EngineIdle: self._engine_idle,
            events.LeaseRequested: self._requested,
            events.ReleasedAndRequested: self._requested,
            events.LeaseReleased: self._released,
            events.PipelineRegistered: self._registered,
            events.MemoryUsed: self._memory,
        }

    def hear(self, entry: Entry) -> None:
        item = entry.item
        pipeline = getattr(item, "pipeline", None)
        if pipeline is not None and pipeline not in self._own and pipeline:
            return  # runs may share a log
        if isinstance(item, actions.Action):
            self._ordered(entry, item)
        handler = self._handlers.get(type(item))
        if handler is not None:
            handler(entry, item)
        for attempts in self._attempts.values():
            attempts.hear(entry.t, item)

    def finish(self) -> None:
        for name, attempts in self._attempts.items():
            measured = self._of(name)
            measured.unexplained += attempts.unexplained
            for engine, warmup in attempts.warmups():
                measured.add(WARMUP, f"{self._number}/{engine}", warmup)
            for batch, took in attempts.durations():
                measured.add(TRAJECTORY, "", took, batch)

    def _of(self, pipeline: str) -> Measured:
        return self._found.setdefault(pipeline, Measured())

    # --- phases ----------------------------------------------------------------------------------------

    def _phase_started(self, entry: Entry, item: events.PhaseStarted) -> None:
        self._phases[item.pipeline, item.role, item.phase] = entry.t
        self._of(item.pipeline).memory.phase(item.role, item.phase, True)

    def _phase_ended(self, entry: Entry, item: events.PhaseEnded) -> None:
        began = self._phases.pop((item.pipeline, item.role, item.phase), None)
        measured = self._of(item.pipeline)
        measured.memory.phase(item.role, item.phase, False)
        if began is not None and item.error is None:
            measured.add(_cost_of(item.role, item.phase), f"{self._number}/{item.role}", entry.t - began)

    # --- actions ---------------------------------------------------------------------------------------

    def _ordered(self, entry: Entry, item: Any) -> None:
        self._actions[item.action] = item, entry.t
        if isinstance(item, actions.GrantLease) and (item.pipeline, item.request) in self._requests:
            if self._requests.pop((item.pipeline, item.request)) is Priority.INITIALIZATION:
                self._initialising[item.epoch] = None
        elif isinstance(item, actions.AwaitMemory) and entry.cause in self._let_go:
            self._watched[item.action] = self._let_go[entry.cause]
        elif isinstance(item, actions.EngineAction):
            self._of(item.pipeline).memory.engine_ordered(item)

    def _done(self, entry: Entry, item: events.ActionDone) -> None:
        action, began = self._actions.pop(item.action, (None, entry.t))
        match action:
            case actions.WakeEngine():
                self._woken(action, entry.t - began)
            case actions.SyncEngine() | actions.SleepEngine():
                self._emptied(entry, action, began)
            case actions.OpenGate():
                self._engine_cost("gate", action, entry.t - began)
            case actions.GrantLease() | actions.ConfirmRelease():
                self._of(action.pipeline).add("command", str(self._number), entry.t - began)
            case actions.AwaitMemory() if item.action in self._watched:
                self._of(self._watched[item.action]).add("release", str(self._number), entry.t - began)

    def _woken(self, action: actions.WakeEngine, took: int) -> None:
        engine = action.pipeline, action.dp_rank
        if action.cold:
            self._lives[engine] = self._lives.get(engine, 0) + 1
        self._engine_cost("restart" if action.cold else "wake", action, took)

    def _emptied(self, entry: Entry, action: actions.SyncEngine | actions.SleepEngine, began: int) -> None:
        if action.emptying is actions.Emptying.DRAIN:
            began = max(began, self._idle_at.get((action.pipeline, action.dp_rank), began))
        self._of(action.pipeline).memory.engine_done(action)
        sleeps = isinstance(action, actions.SleepEngine)
        self._engine_cost("sleep" if sleeps else "sync", action, entry.t - began)
        if sleeps:
            self._let_go[entry.i] = action.pipeline

    def _engine_cost(self, cost: str, action: actions.EngineAction, took: int) -> None:
        life = self._lives.get((action.pipeline, action.dp_rank), 0)
        self._of(action.pipeline).add(cost, f"{self._number}/{action.dp_rank}/{life}", took)

    def _engine_idle(self, entry: Entry, item: events.EngineIdle) -> None:
        self._idle_at[item.pipeline, item.dp_rank] = entry.t

    # --- leases and memory -----------------------------------------------------------------------------

    def _requested(self, entry: Entry, item: events.LeaseRequested | events.ReleasedAndRequested) -> None:
        self._requests[item.pipeline, item.request] = item.priority
        if isinstance(item, events.ReleasedAndRequested):
            self._released(entry, item)

    def _released(self, entry: Entry, item: events.LeaseReleased | events.ReleasedAndRequested) -> None:
        if item.epoch not in self._initialising:
            self._let_go[entry.i] = item.pipeline

    def _registered(self, entry: Entry, item: events.PipelineRegistered) -> None:
        self._of(item.pipeline).started_at.append(entry.t)

    def _memory(self, entry: Entry, item: events.MemoryUsed) -> None:
        for owner, held in item.by.items():
            pipeline, _, worker = owner.partition("/")
            if pipeline in self._own:
                self._of(pipeline).memory.seen(item.gpu, worker, held)


def _cost_of(role: Role, phase: str) -> str:
    if phase == "train":
        return "critic_train" if role is Role.CRITIC else "train"
    return "log_probs" if phase == "values" else phase
