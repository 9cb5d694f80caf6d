"""A world for the pure core: no loop, no clock, no tasks. Whoever drives it decides what happens next, and when.

It plays the client, the backend and the timers by hand: actions wait in `pending` until somebody ends them. After every
event the books must add up, and planning once more must change nothing.
"""

from typing import Any

from core import actions, events
from core.ledger import Phase
from core.model import (
    Cluster,
    DemandPolicy,
    Limits,
    MemoryNeeds,
    PipelineSpec,
    Priority,
    Role,
    WorkerGroup,
)
from core.needs import expected_residue
from core.planner import plan
from core.regions import Regions
from core.scheduler import Decision, decide, new_state
from core.units import NS_PER_S

S = NS_PER_S
GPU = 100
LIMITS = Limits(
    hold=600 * S, init=600 * S, wake=60 * S, sync=60 * S, sleep=60 * S, drain=60 * S, release=30 * S,
    quarantine=600 * S, turn=300 * S, command=10 * S,
)  # fmt: skip
MEMORY = MemoryNeeds(train=40, engine=50, residue=1, init_peak=60, host_cache=1)


def spec(
    name: str, train: tuple[int, ...] = (0,), infer: tuple[int, ...] = (0, 1), tp: int = 1, **fields: Any
) -> PipelineSpec:
    groups = (WorkerGroup(role=Role.ACTOR_TRAIN, gpus=train), WorkerGroup(role=Role.ACTOR_INFER, gpus=infer, tp=tp))
    return PipelineSpec(
        id=name, groups=groups, **{"limits": LIMITS, "memory": MEMORY, "min_residence": 20 * S, **fields}
    )


class CoreWorld:
    """The scheduler's state and everything it waits for."""

    def __init__(self, gpus: int = 2, policy: DemandPolicy = DemandPolicy.BATCH, nodes: int = 1) -> None:
        cluster = Cluster(nodes=nodes, gpus_per_node=gpus // nodes, gpu_memory=GPU, host_memory=1000)
        self.state = new_state(cluster, policy)
        self.now = 0
        self.pending: dict[int, actions.Action] = {}
        """Actions in flight, oldest first."""
        self.timers: dict[str, actions.StartTimer] = {}
        self.life: dict[str, int] = {}
        """Which client of its name speaks for a pipeline; 0 if it is not here."""
        self.seq: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.leases: dict[str, dict[int, actions.GrantLease]] = {}
        """Leases each client knows of, by epoch."""
        self.batches: dict[str, dict[int, list[int]]] = {}
        """Open batches by pipeline: number -> [target, delivered]."""
        self.next_batch: dict[str, int] = {}
        self.notes: list[actions.Note] = []
        self.replies: list[Any] = []
        self.log: list[tuple[int, Any]] = []

    # --- events ----------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> Decision:
        """One event, and the checks that hold after every event."""
        self.log.append((self.now, event))
        decision = decide(self.state, self.now, event)
        for action in decision.actions:
            if isinstance(action, actions.StartTimer):
                self.timers[action.timer] = action
            elif isinstance(action, actions.CancelTimer):
                self.timers.pop(action.timer, None)
            else:
                self.pending[action.action] = action
        self.notes += decision.notes
        self.replies += decision.replies
        self.check()
        return decision

    def check(self) -> None:
        self.state.ledger.check()
        again = plan(self.state.ledger, Regions(self.state.ledger))
        parts = [again.grants, again.expands, again.shrinks, again.revoked]
        changes = [(str(subject), why) for part in parts for subject, why in part]
        assert not changes, f"planning again changes the plan: {changes}"

    def say(self, kind: type[events.Message], pipeline: str, **fields: Any) -> Any:
        """A client message; the reply to it."""
        self.seq[pipeline] = self.seq.get(pipeline, -1) + 1
        life = self.life.get(pipeline, 0)
        decision = self.feed(kind(pipeline=pipeline, seq=self.seq[pipeline], life=life, **fields))
        return decision.replies[-1].error if decision.replies else None

    def end(self, action: actions.Action, how: str = "done") -> Decision:
        """Let an action end: done, failed or unknown."""
        del self.pending[action.action]
        if how == "done" and isinstance(action, actions.Command) and action.life != self.life.get(action.pipeline, 0):
            how = "failed"  # it is for a client that is gone
        if how == "failed":
            return self.feed(events.ActionFailed(action=action.action, reason="it broke"))
        if how == "unknown":
            return self.feed(events.ActionUnknown(action=action.action, reason="silence"))
        if isinstance(action, actions.GrantLease):
            self.leases.setdefault(action.pipeline, {})[action.epoch] = action
        free = {}
        if isinstance(action, actions.AwaitMemory):
            free = {gpu: self.free(gpu) for gpu in action.gpus}
        return self.feed(events.ActionDone(action=action.action, free=free))

    def free(self, gpu: int) -> int:
        """What the device shows while nobody is active on it: everybody keeps what was declared, no more."""
        return GPU - expected_residue(self.state.ledger.residents(gpu), gpu)

    def settle(self, *kinds: type[actions.Action]) -> None:
        """End everything in flight (of these kinds) as done, again and again, until nothing is."""
        while True:
            action = next((a for a in self.pending.values() if not kinds or isinstance(a, kinds)), None)
            if action is None:
                return
            self.end(action)

    def sleep(self, seconds: float) -> None:
        """Let time pass; timers ring in order."""
        until = self.now + int(seconds * S)
        while True:
            timer = min(self.timers.values(), key=lambda t: (t.at, t.action), default=None)
            if timer is None or timer.at > until:
                break
            self.now = max(self.now, timer.at)
            del self.timers[timer.timer]
            self.feed(events.TimerFired(timer=timer.timer, generation=timer.generation))
        self.now = until

    # --- what a pipeline does --------------------------------------------------------------------------

    def join(self, spec: PipelineSpec) -> Any:
        """Register and admit; the error of whichever was refused."""
        refused = self.say(events.PipelineRegistered, spec.id, spec=spec)
        return refused or self.say(events.PipelineAdmitted, spec.id)

    def new_client(self, name: str) -> None:
        """Somebody else speaks under that name from now on, and knows nothing of what was before."""
        self.life[name] = self.life.get(name, 0) + 1
        for known in (self.seq, self.requests, self.leases, self.batches, self.next_batch):
            known.pop(name, None)  # type: ignore[attr-defined]

    def ask(self, name: str, role: Role = Role.ACTOR_TRAIN, priority: Priority = Priority.ACTOR_TRAINING) -> Any:
        self.requests[name] = self.requests.get(name, -1) + 1
        return self.say(events.LeaseRequested, name, request=self.requests[name], role=role, priority=priority)

    def release(self, name: str) -> Any:
        epoch = min(self.leases[name])
        del self.leases[name][epoch]
        return self.say(events.LeaseReleased, name, epoch=epoch)

    def ready(self, *specs: PipelineSpec) -> None:
        """Bring pipelines through their initialisation, one after another."""
        for one in specs:
            assert self.join(one) is None
            assert self.ask(one.id, Role.ACTOR_TRAIN, Priority.INITIALIZATION) is None
            self.settle()
            self.say(events.WeightsPublished, one.id, version=0)
            self.release(one.id)
            self.settle()
            assert self.state.ledger.books[one.id].phase is Phase.READY

    def open(self, name: str, target: int = 8) -> int:
        batch = self.next_batch.get(name, 0)
        self.next_batch[name] = batch + 1
        self.batches.setdefault(name, {})[batch] = [target, 0]
        self.say(events.BatchOpened, name, batch=batch, target=target)
        return batch

    def complete(self, name: str, dp_rank: int | None = None) -> None:
        """One trajectory of the oldest open batch, from the given engine or the lowest one that serves."""
        book = self.state.ledger.books[name]
        if dp_rank is None:
            dp_rank = min(rank for rank, engine in book.up.items() if engine.routable)
        number = min(n for n, (target, delivered) in self.batches[name].items() if delivered < target)
        batch = self.batches[name][number]
        batch[1] += 1
        self.say(
            events.TrajectoryCompleted, name, batch=number, delivered=batch[1], trajectory=batch[1] - 1, attempt=0,
            dp_rank=dp_rank,
        )  # fmt: skip

    def close(self, name: str) -> None:
        number = min(self.batches[name])
        del self.batches[name][number]
        self.say(events.BatchClosed, name, batch=number, reason="taken")

    # --- what it looks like ----------------------------------------------------------------------------

    def up(self, name: str) -> list[int]:
        """Ranks of the engines the pipeline has or is promised."""
        return sorted(self.state.ledger.books[name].up)

    def serving(self, name: str) -> list[int]:
        return sorted(rank for rank, engine in self.state.ledger.books[name].up.items() if engine.routable)

    def holder(self, gpu: int) -> str:
        """Who holds a GPU: a pipeline id, `free`, or its condition."""
        device = self.state.ledger.gpus[gpu]
        tenant = device.engine or device.lease
        return tenant.book.id if tenant is not None else device.hold.value

    def kinds(self) -> list[str]:
        return [type(action).__name__ for action in self.pending.values()]
