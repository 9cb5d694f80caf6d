"""Logs written by hand: a small cast of pipelines, and verbs that write the entries a run would have written.

Each verb does the right thing; a test that wants something wrong writes that one entry itself (`say`, `order`).
Times are given in seconds, entries carry ns.
"""

from collections.abc import Iterable
from typing import Any

from core import actions, events
from core.actions import Emptying
from core.config import Costs, Durations, Job, Scenario
from core.model import BatchKind, Cluster, DemandPolicy, Limits, MemoryNeeds, PipelineSpec, Priority, Role, WorkerGroup
from core.trace import Entry, Verdict, feed
from core.units import gib, ns

LIMITS = Limits(
    hold=ns(100), init=ns(100), wake=ns(10), sync=ns(10), sleep=ns(10), drain=ns(10), release=ns(10),
    quarantine=ns(100), turn=ns(60), command=ns(1),
)  # fmt: skip
MEMORY = MemoryNeeds(train=gib(40), engine=gib(60), residue=gib(1), init_peak=gib(100))
CLUSTER = Cluster(nodes=1, gpus_per_node=2, gpu_memory=gib(141), host_memory=gib(256), memory_margin=gib(1))
COSTS = Costs(
    init=ns(40), train=ns(20), offload=ns(2), onload=ns(2), publish=ns(2), sync=ns(3), sleep=ns(1), wake=ns(1),
    restart=ns(30), trajectory=Durations(parts=((1.0, "constant", ns(10), 0),)),
)  # fmt: skip


def make_spec(id: str = "p1", train: Iterable[int] = (0,), infer: Iterable[int] = (0, 1), tp: int = 1, **fields: Any):
    groups = (
        WorkerGroup(role=Role.ACTOR_TRAIN, gpus=tuple(train)),
        WorkerGroup(role=Role.ACTOR_INFER, gpus=tuple(infer), tp=tp),
    )
    usual = {"limits": LIMITS, "memory": MEMORY, "min_residence": ns(30)}
    return PipelineSpec(id=id, groups=groups, **(usual | fields))


def make_scenario(*specs: PipelineSpec, cluster: Cluster = CLUSTER, **fields: Any) -> Scenario:
    jobs = tuple(Job(spec=spec, steps=1, target=4, costs=COSTS) for spec in specs or (make_spec(),))
    return Scenario(name="story", cluster=cluster, jobs=jobs, **fields)


class Story:
    """Entries in the making."""

    def __init__(self, *specs: PipelineSpec, cluster: Cluster = CLUSTER, demand: DemandPolicy = DemandPolicy.BATCH):
        self.specs = {spec.id: spec for spec in specs or (make_spec(),)}
        self.scenario = make_scenario(*self.specs.values(), cluster=cluster, demand=demand)
        self.entries: list[Entry] = []
        self.now = 0
        self.last_action = 0
        self._seq = dict.fromkeys(self.specs, -1)
        self._epoch = 0
        self._requests = dict.fromkeys(self.specs, -1)
        self._epochs: dict[tuple[str, int], int] = {}

    # --- entries ---------------------------------------------------------------------------------------

    def at(self, seconds: float) -> "Story":
        self.now = ns(seconds)
        return self

    def wait(self, seconds: float) -> "Story":
        self.now += ns(seconds)
        return self

    def pause(self, seconds: float = 1) -> "Story":
        """Time passes, and something of no importance shows it."""
        self.wait(seconds).note("ignored")
        return self

    def say(self, item: Any, cause: int = -1) -> int:
        """Write any entry; its number."""
        self.entries.append(Entry(len(self.entries), self.now, cause, item))
        return len(self.entries) - 1

    def tell(self, kind: type[events.Message], pipeline: str = "p1", /, **fields: Any) -> int:
        """Write a client message with the next seq."""
        self._seq[pipeline] += 1
        return self.say(kind(pipeline=pipeline, seq=self._seq[pipeline], **fields))

    def order(self, kind: type[actions.Action], /, **fields: Any) -> int:
        """Write an action; its number."""
        self.last_action += 1
        self.say(kind(action=self.last_action, **fields))
        return self.last_action

    def done(self, action: int | None = None, free: dict[int, int] | None = None) -> None:
        self.say(events.ActionDone(action=self.last_action if action is None else action, free=free or {}))

    def note(self, kind: str, pipeline: str = "", cause: int = -1, **fields: Any) -> int:
        return self.say(actions.Note(kind=kind, text="", pipeline=pipeline, **fields), cause)

    def verdict(self, outcome: str = "completed") -> int:
        return self.say(Verdict(outcome=outcome))

    def told(self, *listeners: Any) -> Any:
        """Feed the story to listeners; the first one."""
        feed(self.entries, *listeners)
        return listeners[0]

    # --- leases ----------------------------------------------------------------------------------------

    def register(self, pipeline: str = "p1") -> "Story":
        self.tell(events.PipelineRegistered, pipeline, spec=self.specs[pipeline])
        self.tell(events.PipelineAdmitted, pipeline)
        return self

    def request(
        self, pipeline: str = "p1", priority: Priority = Priority.ACTOR_TRAINING, role: Role = Role.ACTOR_TRAIN
    ) -> int:
        self._requests[pipeline] += 1
        self.tell(events.LeaseRequested, pipeline, request=self._requests[pipeline], role=role, priority=priority)
        return self._requests[pipeline]

    def grant(
        self, pipeline: str = "p1", gpus: tuple[int, ...] | None = None, role: Role = Role.ACTOR_TRAIN,
        request: int | None = None,
    ) -> int:  # fmt: skip
        """Grant the latest request; the lease's epoch."""
        self._epoch += 1
        asked = self._requests[pipeline] if request is None else request
        gpus = self.specs[pipeline].group(role).gpus if gpus is None else gpus
        self.order(actions.GrantLease, pipeline=pipeline, request=asked, role=role, epoch=self._epoch, gpus=gpus)
        self.done()
        return self._epoch

    def free(self, *gpus: int, seen: int = gib(138), need: int = gib(61)) -> None:
        """Memory awaited and seen."""
        for gpu in gpus:
            self.order(actions.AwaitMemory, gpus=(gpu,), need=(need,))
            self.done(free={gpu: seen})

    def lease(self, pipeline: str = "p1", seconds: float = 20) -> "Story":
        """Ask for the train lease, get it, train, give it back."""
        spec = self.specs[pipeline]
        gpus = spec.group(Role.ACTOR_TRAIN).gpus
        self.request(pipeline)
        epoch = self.grant(pipeline)
        self.phase("train", seconds, pipeline, gpus)
        self.tell(events.LeaseReleased, pipeline, epoch=epoch)
        self.free(*gpus)
        return self

    def phase(self, phase: str, seconds: float, pipeline: str = "p1", gpus: tuple[int, ...] = (0,)) -> None:
        role = Role.ACTOR_TRAIN
        self.say(events.PhaseStarted(pipeline=pipeline, role=role, phase=phase, gpus=gpus))
        self.wait(seconds)
        self.say(events.PhaseEnded(pipeline=pipeline, role=role, phase=phase))

    def initialise(
        self, pipeline: str = "p1", seconds: float = 40, batch: int | None = None, confirmed: bool = True
    ) -> "Story":
        """Register, initialise, publish version 0, and open batch 0 with this target."""
        self.register(pipeline)
        union = self.specs[pipeline].union
        self.request(pipeline, Priority.INITIALIZATION)
        epoch = self.grant(pipeline, union)
        self.phase("init", seconds, pipeline, union)
        self.tell(events.WeightsPublished, pipeline, version=0)
        if batch is not None:
            self.open(batch, pipeline)
        self.tell(events.LeaseReleased, pipeline, epoch=epoch)
        if confirmed:
            self.free(*union)
        return self

    # --- engines ---------------------------------------------------------------------------------------

    def engine(self, kind: type[actions.EngineAction], rank: int = 0, pipeline: str = "p1", **fields: Any) -> int:
        if kind is actions.WakeEngine:
            self._epoch += 1
            self._epochs[(pipeline, rank)] = self._epoch
        epoch = self._epochs.get((pipeline, rank), 0)
        return self.order(kind, pipeline=pipeline, dp_rank=rank, epoch=epoch, **fields)

    def wake(self, rank: int = 0, pipeline: str = "p1", seconds: float = 1) -> "Story":
        self.engine(actions.WakeEngine, rank, pipeline, gpus=self.specs[pipeline].infer.bundle(rank))
        self.wait(seconds).done()
        return self

    def sync(self, version: int, rank: int = 0, pipeline: str = "p1", seconds: float = 3) -> "Story":
        self.engine(actions.SyncEngine, rank, pipeline, version=version)
        self.wait(seconds).done()
        return self

    def gate(self, version: int, rank: int = 0, pipeline: str = "p1") -> "Story":
        self.engine(actions.OpenGate, rank, pipeline, version=version)
        self.done()
        return self

    def serve(self, rank: int = 0, pipeline: str = "p1", version: int = 0) -> "Story":
        """Wake, sync and open."""
        return self.wake(rank, pipeline).sync(version, rank, pipeline).gate(version, rank, pipeline)

    def serve_all(self, pipeline: str = "p1", version: int = 0) -> "Story":
        """All engines at once, so that none of them stays idle meanwhile."""
        spec, ranks = self.specs[pipeline], range(self.specs[pipeline].infer.size)
        woken = [self.engine(actions.WakeEngine, r, pipeline, gpus=spec.infer.bundle(r)) for r in ranks]
        self.wait(1)
        for action in woken:
            self.done(action)
        synced = [self.engine(actions.SyncEngine, r, pipeline, version=version) for r in ranks]
        self.wait(3)
        for rank, action in enumerate(synced):
            self.done(action)
            self.gate(version, rank, pipeline)
        return self

    def sleep(self, rank: int = 0, pipeline: str = "p1", seconds: float = 1, confirmed: bool = True) -> "Story":
        self.engine(actions.SleepEngine, rank, pipeline, emptying=Emptying.ABORT)
        self.wait(seconds).done()
        if confirmed:
            self.free(*self.specs[pipeline].infer.bundle(rank))
        return self

    def busy(self, rank: int = 0, pipeline: str = "p1") -> None:
        self.say(events.EngineBusy(pipeline=pipeline, dp_rank=rank))

    def idle(self, rank: int = 0, pipeline: str = "p1") -> None:
        self.say(events.EngineIdle(pipeline=pipeline, dp_rank=rank))

    # --- rollouts --------------------------------------------------------------------------------------

    def open(self, target: int, pipeline: str = "p1", batch: int = 0, kind: BatchKind = BatchKind.TRAIN) -> "Story":
        self.tell(events.BatchOpened, pipeline, batch=batch, target=target, kind=kind)
        return self

    def complete(
        self, trajectory: int, pipeline: str = "p1", batch: int = 0, delivered: int | None = None, attempt: int = 0,
        rank: int = 0, segments: tuple[tuple[int, int], ...] = ((0, 100),),
    ) -> int:  # fmt: skip
        return self.tell(
            events.TrajectoryCompleted, pipeline, batch=batch, trajectory=trajectory, attempt=attempt, dp_rank=rank,
            delivered=trajectory + 1 if delivered is None else delivered, segments=segments,
        )  # fmt: skip

    def drop(self, trajectory: int, pipeline: str = "p1", batch: int = 0, reason: str = "stale") -> int:
        return self.say(events.TrajectoryDropped(pipeline=pipeline, batch=batch, trajectory=trajectory, reason=reason))

    def close(self, pipeline: str = "p1", batch: int = 0) -> "Story":
        self.tell(events.BatchClosed, pipeline, batch=batch, reason="taken")
        return self

    def take(
        self, trajectories: Iterable[int], pipeline: str = "p1", batch: int = 0, version: int = 0,
        staleness: Iterable[int] | None = None,
    ) -> int:  # fmt: skip
        taken = tuple(trajectories)
        behind = (version,) * len(taken) if staleness is None else tuple(staleness)
        return self.say(
            events.BatchTaken(pipeline=pipeline, batch=batch, version=version, trajectories=taken, staleness=behind)
        )

    def leave(self, pipeline: str = "p1", error: str | None = None) -> "Story":
        """Say goodbye, be stopped, end."""
        self.tell(events.PipelineLeft, pipeline, error=error)
        self.order(actions.StopPipeline, pipeline=pipeline, reason="it left")
        self.done()
        self.say(events.PipelineEnded(pipeline=pipeline, error=error))
        return self


def one_step(story: Story, pipeline: str = "p1", target: int = 4) -> Story:
    """A whole life of one pipeline with one training step, as it should be."""
    story.initialise(pipeline, batch=target).serve_all(pipeline)
    ranks = range(story.specs[pipeline].infer.size)
    for rank in ranks:
        story.busy(rank, pipeline)
    for trajectory in range(target):
        story.wait(5).complete(trajectory, pipeline)
    for rank in ranks:
        story.idle(rank, pipeline)
    story.close(pipeline).take(range(target), pipeline)
    for rank in ranks:
        story.sleep(rank, pipeline)
    story.lease(pipeline)
    story.tell(events.WeightsPublished, pipeline, version=1)
    story.say(events.StepCompleted(pipeline=pipeline, step=0))
    return story.leave(pipeline)
