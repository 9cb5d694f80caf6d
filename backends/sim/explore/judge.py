"""One case, run under one schedule and judged by every oracle there is.

1. The monitor's rules first (S1 to S7, L1 to L5). Then what the explorer can know because it made the world: which
   pipelines had a reason to fail, that nothing is left when everybody is gone, that the books agree with themselves.
2. After the last pipeline the world is given time to come to rest; what is still held or under way then is left over.
3. What a run did (`Judgement`) is small and can be sent between processes; the log is only kept by `explain`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from backends.sim.backend import SimBackend
from backends.sim.explore import guests, strategies, swarm
from backends.sim.explore.case import Case, Finding
from backends.sim.loop import run_sim
from backends.sim.policies import Policy
from core import actions
from core.backend import Clock
from core.closeness import Wait
from core.config import Fault
from core.errors import InvariantBroken, RequestError, TurnstileError, WorldError
from core.events import FaultInjected, Message, PipelineEnded
from core.ledger import Hold, Phase
from core.pipeline import describe, first_error, wait_until
from core.run import Result, execute
from core.service import Listener, Service
from core.state import State
from core.trace import Violation
from core.units import NS_PER_S

SETTLE_NS = 3_600 * NS_PER_S
"""How long the world may take to come to rest once the last pipeline is gone; longer than all its limits together."""
PAUSE_MOST = 60 * NS_PER_S
ENDLESS_NS = 100_000_000 * NS_PER_S
"""Three years of virtual time: no run of a few steps gets there."""


class World(SimBackend):
    """The simulator with guests among its pipelines, an order of its own and an end to all faults."""

    def __init__(self, case: Case, policy: Policy) -> None:
        options = {"release_lag": case.release_lag} if case.release_lag.parts or case.release_lag.samples else {}
        super().__init__(guests.everybody(case), **options)
        self._heal_at = case.heal_at
        self._policy = policy

    def run(self, main: Callable[[], Any]) -> Any:  # type: ignore[override]
        return run_sim(main, policy=self._policy)

    async def open(self, emit: Any) -> None:
        await super().open(emit)
        if self._scenario.faults:
            self._loop.call_at_ns(self._heal_at, self.heal, daemon=True)
        self._loop.call_at_ns(ENDLESS_NS, _endless, daemon=True)

    def heal(self) -> None:
        """From now on nothing goes wrong that has not begun."""
        self.world.armed.clear()
        for crew in self._crews.values():
            for engine in crew.engines:
                engine.slow_down(1.0)

    def vanish(self, pipeline: str) -> None:
        """This client's process is gone."""
        self._faults._strike(Fault(at=0, kind="kill_client", pipeline=pipeline))

    def miss(self, pipeline: str, life: int) -> None:
        """This client of that name has gone away without a word; another may take its place."""
        self._faults.miss(pipeline, life)

    def say(self, message: Message) -> None:
        """A message from the past, straight to the service."""
        self._deliver(message)

    def carry(self, message: Message, deliver: Callable[[Message], None]) -> None:
        self._deliver = deliver
        super().carry(message, deliver)


def _endless() -> None:
    raise TurnstileError("the run does not end")


class NoAccounting:
    """Where the time went is nobody's question here."""

    observed = None  # so the monitor draws its own picture

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None: ...

    def figures(self, end_ns: int) -> dict[str, Any]:
        return {}


class Judgement:
    """What came of one run."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self.outcome = ""
        self.entries = 0
        self.closest: tuple[Wait, ...] = ()
        """How close it came to its bounds: the closest wait of each rule that has one."""
        self.struck: dict[str, int] = {}
        """Faults that happened, by kind."""
        self.decisions: list[int] = []
        """Most holds possible at each decision of the schedule; empty under FIFO."""
        self.holds: dict[int, int] = {}
        """The schedule as it was, written down."""


def judge(case: Case, listeners: Sequence[Listener] = (), *, thorough: bool = False) -> Judgement:
    """Run a case. `thorough`: the ledger checks its own books after every event."""
    return Trial(case, thorough).run(listeners)


class Trial:
    """A run being judged; also the one listener the judge needs."""

    def __init__(self, case: Case, thorough: bool) -> None:
        self.case = case
        self.judgement = Judgement()
        self.service: Service | None = None
        self._thorough = thorough
        self._to_end = len(case.scenario.jobs)
        self._all_ended = False
        self._ended: anyio.Event | None = None
        self._left = ""
        self._broken: InvariantBroken | None = None
        self._now = 0

    def run(self, listeners: Sequence[Listener]) -> Judgement:
        made = self.judgement
        policy = strategies.policy_of(self.case.schedule)
        recorder = strategies.Recorder(policy)
        self._world = World(self.case, policy if isinstance(policy, strategies.Fifo) else recorder)
        try:
            result = execute(
                self.case.scenario,
                self._world,  # type: ignore[arg-type]  # runs itself, with its order
                [self, *listeners],
                accounting=NoAccounting(),  # type: ignore[arg-type]
                beside=self._beside,
            )
            made.outcome, made.closest = result.outcome, result.closest
            made.finding = self._of_books() or self._of_monitor(result) or self._of_pipelines(result) or self._of_rest()
        except Exception as problem:
            error = first_error(problem)
            made.outcome = "crashed"
            made.finding = self._finding("crash", type(error).__name__, describe(error) or "")
        made.decisions, made.holds = recorder.decisions, recorder.made
        return made

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        made = self.judgement
        made.entries = i + 1
        self._now = t_ns
        if type(item) is PipelineEnded:
            self._to_end -= 1
            if not self._to_end and self._ended is not None:
                self._ended.set()
        elif type(item) is FaultInjected:
            made.struck[item.kind] = made.struck.get(item.kind, 0) + 1
        if self._thorough and self._broken is None:
            self._check_books()

    def _check_books(self) -> None:
        try:
            if self.service is not None:
                self.service.state.ledger.check()
        except InvariantBroken as broken:
            self._broken = broken

    # --- beside the pipelines -----------------------------------------------------------------------------

    async def _beside(self, service: Service) -> None:
        """The guests; and, when all pipelines are gone, the time it takes the world to come to rest."""
        self.service = service
        self._ended = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for guest in self.case.guests:
                tasks.start_soon(guests.Client(guest, service, self._world).run, name=guest.job.spec.id)
        if self._to_end:
            await self._ended.wait()
        await self._come_to_rest(service, self._world.clock)

    async def _come_to_rest(self, service: Service, clock: Clock) -> None:
        pause, end = NS_PER_S, clock.now_ns() + SETTLE_NS
        while (left := left_over(service.state)) and clock.now_ns() < end:
            await wait_until(clock, clock.now_ns() + pause)
            pause = min(2 * pause, PAUSE_MOST)
        self._left = left
        self._check_books()

    # --- verdicts -----------------------------------------------------------------------------------------

    def _finding(self, rule: str, outcome: str, text: str, at_ns: int | None = None) -> Finding:
        return Finding(rule=rule, outcome=outcome, text=text, at_ns=self._now if at_ns is None else at_ns)

    def _of_books(self) -> Finding | None:
        if self._broken is None:
            return None
        return self._finding("books", "InvariantBroken", str(self._broken))

    def _of_monitor(self, result: Result) -> Finding | None:
        """A crash inside a pipeline comes first: what the rules say after it may be its echo."""
        for name, error in result.errors.items():
            if error is not None and not isinstance(error, WorldError | RequestError):
                return self._finding("crash", type(error).__name__, f"{name}: {describe(error)}")
        for violation in result.violations:
            if not self._of_a_guest(violation):
                return self._finding(violation.rule, result.outcome, violation.detail, violation.at_ns)
        if result.outcome not in ("completed", "failed"):
            return self._finding("outcome", result.outcome, result.diagnosis or "")
        return None

    def _of_a_guest(self, violation: Violation) -> bool:
        """A guest that lies about its own samples breaks the rules itself; the scheduler can only refuse it."""
        ids = [guest.job.spec.id for guest in self.case.guests]
        return violation.rule in ("S5", "S6") and any(id in violation.detail.replace(":", " ").split() for id in ids)

    def _of_pipelines(self, result: Result) -> Finding | None:
        struck = [fault for fault in self.case.scenario.faults if fault.at <= self._now]
        for job in self.case.scenario.jobs:
            error = result.errors.get(job.spec.id)
            if error is not None and not swarm.excuse(self.case.scenario, job, struck):
                return self._finding("unexcused", type(error).__name__, f"{job.spec.id}: {describe(error)}")
        return None

    def _of_rest(self) -> Finding | None:
        return self._finding("leftover", self.judgement.outcome, self._left) if self._left else None


def left_over(state: State) -> str:
    """What is still held or under way, in one line; empty: nothing. GPUs may stay in quarantine, or be lost; and a
    registration that arrived once more after its pipeline was gone holds nothing."""
    ledger = state.ledger
    for action, _ in state.operations.values():
        if not (isinstance(action, actions.AwaitMemory) and ledger.gpus[action.gpus[0]].hold is Hold.QUARANTINED):
            return f"{type(action).__name__} (action {action.action}) is still under way"
    for gpu in ledger.gpus:
        if gpu.hold in (Hold.HELD, Hold.CLEARING) or gpu.promised is not None:
            return f"GPU {gpu.id} is {gpu.hold.value} ({gpu.why}), promised to {gpu.promised}"
    for kind in ("leases", "waiting", "doomed", "promised", "unserving"):
        if getattr(ledger, kind):
            return f"the ledger still has {kind}: {', '.join(map(str, getattr(ledger, kind)))}"
    for book in ledger.books.values():
        if book.alive and book.phase is not Phase.REGISTERED:
            return f"pipeline {book.id} is still {book.phase}"
    for name in state.timers:
        if not name.startswith("quarantine/"):
            return f"the timer {name} still runs"
    return ""
