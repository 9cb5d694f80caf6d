"""Who has which GPU and how far each pipeline is, followed from the log: what the live view and reports show.

1. It only listens. Nothing here can change a run, and it trusts nothing but the entries it is given.
2. It is for people: the figures of `--json` come from the run's own accounting, not from here.
3. Its memory is bounded: beyond `ROWS` GPUs no history is kept, and long histories get coarser.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from core import actions, events
from core.config import Scenario
from scenarios.idle_holders import IdleHolders

ROWS = 64
"""GPUs with a timeline of their own; more rows than that nobody reads."""
SEGMENTS = 4096
"""Stretches remembered for one GPU; past that, neighbours are merged in pairs."""

SERVING = ("awake", "decoding")
ENGINE_STATE: dict[type[actions.EngineAction], str] = {
    actions.WakeEngine: "wake",
    actions.SyncEngine: "sync",
    actions.SleepEngine: "sleep",
    actions.KillEngine: "sleep",
}
"""What an engine's GPUs are doing while the action runs."""


class Cell(NamedTuple):
    """What one GPU is doing: a state of `scenarios.timeline.LOOK`, and for whom (empty: nobody)."""

    state: str = "free"
    pipeline: str = ""


class Segment(NamedTuple):
    """A stretch of one GPU's time, in ns."""

    start: int
    end: int
    cell: Cell


class Progress:
    """How far one pipeline is."""

    __slots__ = ("batches", "doing", "error", "id", "over", "seq", "steps", "steps_done")

    def __init__(self, pipeline: str, steps: int) -> None:
        self.id = pipeline
        self.steps = steps
        self.steps_done = 0
        self.batches: dict[int, tuple[int, int]] = {}
        """Open batches: number -> (delivered, target)."""
        self.doing = "waiting"
        """The trainer phase that is running, or what it does instead."""
        self.over = False
        self.error: str | None = None
        self.seq = -1

    @property
    def demand(self) -> int:
        """Trajectories still wanted, over the open batches."""
        return sum(max(0, target - delivered) for delivered, target in self.batches.values())

    @property
    def open_batch(self) -> tuple[int, int]:
        """(delivered, target) of the oldest open batch; (0, 0) if none is open."""
        return self.batches[min(self.batches)] if self.batches else (0, 0)


class Board:
    """A listener: call it with every entry of a run, in order."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0
        self.progress = {job.spec.id: Progress(job.spec.id, job.steps) for job in scenario.jobs}
        self.cells = [Cell()] * scenario.cluster.gpus
        self.idle_holders = IdleHolders([job.spec for job in scenario.jobs])
        self._history: list[list[Segment]] = [[] for _ in range(scenario.cluster.gpus if self.has_rows else 0)]
        self._since = [0] * scenario.cluster.gpus
        self._bundles = {
            (job.spec.id, rank): job.spec.infer.bundle(rank)
            for job in scenario.jobs
            for rank in range(job.spec.infer.size)
        }
        self._awake: dict[tuple[str, int], None] = {}
        self._decoding: dict[tuple[str, int], bool] = {}
        self._started: dict[int, actions.Action] = {}
        self._leases: dict[tuple[str, int], tuple[int, ...]] = {}
        self._phases: dict[tuple[str, str], tuple[int, ...]] = {}
        self._react: dict[type, Callable[[Any], None]] = _reactions(self)

    def __call__(self, i: int, t_ns: int, cause: int, item: object) -> None:
        react = self._react.get(type(item))
        if react is not None:
            self.now = t_ns
            react(item)

    @property
    def has_rows(self) -> bool:
        """Whether each GPU has a timeline."""
        return self.scenario.cluster.gpus <= ROWS

    def timeline(self, end_ns: int) -> list[list[Segment]]:
        """Each GPU's history up to `end_ns`, oldest first, without gaps; empty if there are too many GPUs."""
        return [
            [*past, Segment(self._since[gpu], end_ns, self.cells[gpu])] if end_ns > self._since[gpu] else past
            for gpu, past in enumerate(self._history)
        ]

    # --- progress -------------------------------------------------------------------------------------

    def message(self, message: events.Message) -> None:
        """Apply a client's message by the rule of `core.events`: the next one, or a later one with the whole state."""
        progress = self.progress.get(message.pipeline)
        if progress is None:
            return
        whole = isinstance(message, events.StateResent)
        if message.seq == progress.seq + 1 or (whole and message.seq > progress.seq):
            progress.seq = message.seq
            self._apply(progress, message)

    def _apply(self, progress: Progress, message: events.Message) -> None:
        match message:
            case events.BatchOpened(batch=batch, target=target):
                progress.batches[batch] = (0, target)
            case events.TrajectoryCompleted(batch=batch, delivered=delivered) if batch in progress.batches:
                progress.batches[batch] = (delivered, progress.batches[batch][1])
            case events.DemandChanged(batch=batch, target=target, delivered=delivered) if batch in progress.batches:
                progress.batches[batch] = (delivered, target)
            case events.BatchClosed(batch=batch):
                progress.batches.pop(batch, None)
            case events.StateResent(state=state):
                progress.batches = {open_.batch: (open_.delivered, open_.target) for open_ in state.batches}
            case events.LeaseReleased(epoch=epoch) | events.ReleasedAndRequested(epoch=epoch):
                gpus = self._leases.pop((progress.id, epoch), ())
                self._set((gpu for gpu in gpus if self.cells[gpu] == Cell("held", progress.id)), "release", progress.id)
            case events.PipelineLeft():
                progress.batches = {}
        self.idle_holders.wants(progress.id, progress.demand > 0, self.now)

    def step(self, event: events.StepCompleted) -> None:
        self.progress[event.pipeline].steps_done += 1

    def ended(self, event: events.PipelineEnded) -> None:
        progress = self.progress[event.pipeline]
        progress.over, progress.error = True, event.error

    def phase_started(self, event: events.PhaseStarted) -> None:
        self.progress[event.pipeline].doing = event.phase
        self._phases[event.pipeline, event.role] = event.gpus
        self._set(event.gpus, event.phase, event.pipeline)

    def phase_ended(self, event: events.PhaseEnded) -> None:
        self.progress[event.pipeline].doing = "waiting"
        gpus = self._phases.pop((event.pipeline, event.role), ())
        self._set((gpu for gpu in gpus if self.cells[gpu].pipeline == event.pipeline), "held", event.pipeline)

    # --- engines and GPUs -----------------------------------------------------------------------------

    def engine_started(self, action: actions.EngineAction) -> None:
        self._started[action.action] = action
        self._set(self._bundles[action.pipeline, action.dp_rank], ENGINE_STATE[type(action)], action.pipeline)
        if not isinstance(action, actions.SyncEngine):
            self._count_awake(action.pipeline, action.dp_rank, isinstance(action, actions.WakeEngine))

    def memory_awaited(self, action: actions.AwaitMemory) -> None:
        self._started[action.action] = action
        for gpu in action.gpus:
            if self.cells[gpu].state != "quarantine":
                self._set((gpu,), "release", self.cells[gpu].pipeline)

    def granted(self, action: actions.GrantLease) -> None:
        self._leases[action.pipeline, action.epoch] = action.gpus
        self._set(action.gpus, "held", action.pipeline)

    def stopped(self, action: actions.StopPipeline) -> None:
        owned = [gpu for gpu, cell in enumerate(self.cells) if cell.pipeline == action.pipeline]
        self._set(owned, "release", action.pipeline)
        for rank in [rank for pipeline, rank in self._awake if pipeline == action.pipeline]:
            self._count_awake(action.pipeline, rank, False)

    def done(self, event: events.ActionDone) -> None:
        action = self._started.pop(event.action, None)
        match action:
            case actions.WakeEngine(pipeline=pipeline) | actions.SyncEngine(pipeline=pipeline):
                self._show_serving(pipeline, action.dp_rank)
            case actions.SleepEngine(pipeline=pipeline) | actions.KillEngine(pipeline=pipeline):
                self._set(self._bundles[pipeline, action.dp_rank], "release", pipeline)
            case actions.AwaitMemory(gpus=gpus):
                self._set((gpu for gpu in gpus if self.cells[gpu].state in ("release", "quarantine")), "free", "")

    def not_done(self, event: events.ActionFailed | events.ActionUnknown) -> None:
        self._started.pop(event.action, None)

    def decoding(self, event: events.EngineBusy | events.EngineIdle) -> None:
        self._decoding[event.pipeline, event.dp_rank] = isinstance(event, events.EngineBusy)
        bundle = self._bundles[event.pipeline, event.dp_rank]
        if self.cells[bundle[0]].pipeline == event.pipeline and self.cells[bundle[0]].state in SERVING:
            self._show_serving(event.pipeline, event.dp_rank)

    def died(self, event: events.EngineDied) -> None:
        self._decoding.pop((event.pipeline, event.dp_rank), None)
        bundle = self._bundles[event.pipeline, event.dp_rank]
        self._set((gpu for gpu in bundle if self.cells[gpu].pipeline == event.pipeline), "release", event.pipeline)
        self._count_awake(event.pipeline, event.dp_rank, False)

    def node_left(self, event: events.NodeLeft) -> None:
        first = event.node * self.scenario.cluster.gpus_per_node
        self._set(range(first, first + self.scenario.cluster.gpus_per_node), "lost", "")

    def note(self, note: actions.Note) -> None:
        if note.kind == "quarantine":
            for gpu in note.gpus:
                self._set((gpu,), "quarantine", self.cells[gpu].pipeline)

    def _count_awake(self, pipeline: str, dp_rank: int, is_awake: bool) -> None:
        if ((pipeline, dp_rank) in self._awake) == is_awake:
            return
        gpus = len(self._bundles[pipeline, dp_rank])
        if is_awake:
            self._awake[pipeline, dp_rank] = None
            self.idle_holders.woken(pipeline, gpus, self.now)
        else:
            del self._awake[pipeline, dp_rank]
            self.idle_holders.put_to_sleep(pipeline, gpus, self.now)

    def _show_serving(self, pipeline: str, dp_rank: int) -> None:
        state = "decoding" if self._decoding.get((pipeline, dp_rank)) else "awake"
        self._set(self._bundles[pipeline, dp_rank], state, pipeline)

    def _set(self, gpus: Iterable[int], state: str, pipeline: str) -> None:
        cell = Cell(state, pipeline)
        for gpu in list(gpus):
            before = self.cells[gpu]
            if before != cell and before.state != "lost":
                self._remember(gpu, before)
                self.cells[gpu] = cell

    def _remember(self, gpu: int, before: Cell) -> None:
        start, self._since[gpu] = self._since[gpu], self.now
        if self._history and self.now > start:
            past = self._history[gpu]
            past.append(Segment(start, self.now, before))
            if len(past) > SEGMENTS:
                self._history[gpu] = coarser(past)


def coarser(segments: list[Segment]) -> list[Segment]:
    """Half as many stretches: of each two neighbours, the longer one's cell stands for both."""
    halved = []
    for first, second in zip(segments[::2], segments[1::2], strict=False):
        longer = max(first, second, key=lambda segment: segment.end - segment.start)
        halved.append(Segment(first.start, second.end, longer.cell))
    return halved + segments[len(segments) - len(segments) % 2 :]


def _reactions(board: Board) -> dict[type, Callable[[Any], None]]:
    """What the board does for each kind of entry; others pass it by."""
    return {
        **dict.fromkeys(events.CLIENT.__args__, board.message),
        **dict.fromkeys(ENGINE_STATE, board.engine_started),
        actions.AwaitMemory: board.memory_awaited,
        actions.GrantLease: board.granted,
        actions.StopPipeline: board.stopped,
        actions.Note: board.note,
        events.ActionDone: board.done,
        events.ActionFailed: board.not_done,
        events.ActionUnknown: board.not_done,
        events.EngineBusy: board.decoding,
        events.EngineIdle: board.decoding,
        events.EngineDied: board.died,
        events.NodeLeft: board.node_left,
        events.PhaseStarted: board.phase_started,
        events.PhaseEnded: board.phase_ended,
        events.StepCompleted: board.step,
        events.PipelineEnded: board.ended,
    }
