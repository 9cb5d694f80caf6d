"""The control plane by itself: its real code (service, journal, outboxes, encoding) in this process, with workers that
do everything at once and drivers that say what a pipeline's loop says. No Ray call is made.

    python -m benchmarks ray [--quick]

Pipelines share GPUs in pairs, as in the incident: each trains on one GPU of two and rolls out on both. A step is a
batch opened, some trajectories, the batch taken, a lease asked for, granted and given back, weights published.

* decisions a second: processor time of the whole process, drivers included, for what a hundred pipelines have to say;
* memory: what this process has resident after many steps against after some. The journal is on disk.
"""

import asyncio
import gc
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from backends.ray_gpu import wire
from backends.ray_gpu.clock import RealClock
from backends.ray_gpu.control import ControlPlane
from backends.ray_gpu.plan import CrewPlan
from benchmarks.day import COSTS, MEMORY
from benchmarks.table import Row, at_most, fact
from core import actions, defaults, events
from core.backend import Answer, MayBegin
from core.config import Job
from core.model import Cluster, DemandPolicy, PipelineSpec, Priority, Role, WorkerGroup
from core.trace import own_version
from core.units import gib

PIPELINES = 100
STEPS = 10_000
"""Of all pipelines together."""
EARLY = 0.2
"""Part of the steps after which memory is looked at for the first time: caches and arenas have their size by then."""
TRAJECTORIES = 8
GROWTH_MIB_MAX = 4.0
"""Flat: less than 0.5 kB a step, and what the allocator does of its own accord."""
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` a tenth of the steps."""
    steps = STEPS // 10 if quick else STEPS
    few = asyncio.run(_measure(2, steps))  # first, while nothing that somebody else has freed could hide what it takes
    many = asyncio.run(_measure(PIPELINES, steps // 5))
    return [
        fact(f"decisions, {PIPELINES} pipelines on {PIPELINES} GPUs", many.decisions / many.spent_s, "1/s"),
        fact("of it, a decision with its way in and out", many.spent_s / many.decisions * 1e6, "us"),
        at_most(f"memory grown, {few.early} to {steps} steps", few.grown_mib, "MiB", GROWTH_MIB_MAX),
        fact("resident after that", few.resident_mib, "MiB"),
        fact("journal, a step", few.journal / steps / 1024, "KiB"),
    ]


class Measured(msgspec.Struct):
    early: int
    decisions: int = 0
    spent_s: float = 0.0
    grown_mib: float = 0.0
    resident_mib: float = 0.0
    journal: int = 0
    """Bytes on disk."""


async def _measure(pipelines: int, steps: int) -> Measured:
    """Run `steps` steps of all pipelines together, on a control plane of their own."""
    found = Measured(early=int(steps * EARLY))
    control = OnPaper(pipelines)
    try:
        driver = Driver(control, [_job(i) for i in range(pipelines)])
        await driver.join()
        await driver.until(found.early)
        at_first, decided, began = _resident(), driver.decisions, time.process_time()
        await driver.until(steps)
        found.spent_s = time.process_time() - began
        found.decisions = driver.decisions - decided
        found.resident_mib = _resident() / MIB
        found.grown_mib = found.resident_mib - at_first / MIB
        found.journal = control.journal_bytes()
    finally:
        await control.close()
        control.clean()
    return found


def _resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def _job(i: int) -> Job:
    pair = (i - i % 2, i - i % 2 + 1)
    groups = (WorkerGroup(role=Role.ACTOR_TRAIN, gpus=(i,)), WorkerGroup(role=Role.ACTOR_INFER, gpus=pair))
    spec = PipelineSpec(id=f"p{i}", groups=groups, limits=defaults.limits(COSTS, 0), memory=MEMORY)
    return Job(spec=spec, steps=1, target=TRAJECTORIES, costs=COSTS)


# --- workers that do everything at once ---------------------------------------------------------------------


class Obliging:
    """What the control plane takes for its fleet. An action is done in the next step of the event loop."""

    name = "ray_gpu"

    def __init__(self, clock: RealClock) -> None:
        self.clock = clock
        self.devices: dict[int, str] = {}
        """Nothing to say of any card."""

    async def open(self, emit: Callable[[events.AnyEvent], None]) -> None: ...

    async def close(self) -> None: ...

    def know(self, plan: CrewPlan) -> None: ...

    def begin(self, action: Any, may_begin: MayBegin, answer: Answer) -> Callable[[], None]:
        free = dict.fromkeys(action.gpus, gib(1000)) if isinstance(action, actions.AwaitMemory) else {}

        def work() -> None:
            if may_begin(action):
                answer(action, events.ActionDone(action=action.action, free=free))

        return asyncio.get_running_loop().call_soon(work).cancel


class OnPaper(ControlPlane):
    """The control plane with these workers."""

    def __init__(self, gpus: int) -> None:
        cluster = Cluster(nodes=1, gpus_per_node=gpus, gpu_memory=gib(1024), host_memory=gib(4096))
        self.options = wire.ClusterOptions(device="cpu", heartbeat_s=600)
        super().__init__(f"paper-{os.getpid()}-{gpus}", cluster, DemandPolicy.BATCH, self.options, time.time_ns())
        self.cluster = cluster

    def _make_fleet(self) -> Any:
        return Obliging(self.clock)

    def journal_bytes(self) -> int:
        return self._places.journal.stat().st_size

    def clean(self) -> None:
        shutil.rmtree(self._places.disk)


# --- a driver that says what loops say ----------------------------------------------------------------------


class Driver:
    """Joins with some pipelines, and keeps them stepping as fast as it is answered. It takes in what it is told as a
    real one does, but for the check that the log replays."""

    def __init__(self, control: OnPaper, jobs: list[Job]) -> None:
        self._control = control
        self._jobs = jobs
        self._loops = {job.spec.id: Loop(job, self) for job in jobs}
        self._out: deque[wire.Up] = deque()
        self._incarnation = ""
        self._after = self._number = self._entries = 0
        self.steps = 0
        self.decisions = 0
        """Entries that the scheduler decided on."""

    async def join(self) -> None:
        request = wire.JoinRequest(
            run="paper", version=own_version(), cluster=self._control.cluster, demand=DemandPolicy.BATCH,
            options=self._control.options, pipelines=tuple(job.spec.id for job in self._jobs),
        )  # fmt: skip
        plans = [CrewPlan(job=job, seed=0) for job in self._jobs]
        await self._control.join(msgspec.msgpack.encode(request), msgspec.msgpack.encode(plans))
        for loop in self._loops.values():
            loop.begin()

    def say(self, event: events.AnyEvent) -> None:
        self._out.append(wire.Said(event=event))

    async def until(self, steps: int) -> None:
        """Go on until so many steps are done."""
        while self.steps < steps:
            frames = await self._fetch()
            for packed in frames:
                self._take(wire.unpack_down(packed))
            if self._out and self._incarnation:
                said = list(self._out)
                self._out.clear()
                assert await self._control.say("paper", self._incarnation, self._number, wire.pack(said))
                self._number += len(said)

    async def _fetch(self) -> list[bytes]:
        incarnation, self._after, frames = await self._control.listen(
            "paper", self._incarnation, self._after, self._entries
        )
        self._incarnation = incarnation
        return frames

    def _take(self, frame: wire.Down) -> None:
        match frame:
            case wire.Entries():
                lines = frame.lines.count(b"\n")
                self._entries += lines
                self.decisions += lines - sum(frame.lines.count(kind) for kind in UNDECIDED)
            case wire.Replied():
                assert frame.error is None, frame.error
            case wire.Commanded():
                self._out.append(wire.Answered(action=frame.action.action))
                assert isinstance(frame.action, actions.GrantLease), frame.action
                self._loops[frame.action.pipeline].granted(frame.action.epoch)
            case wire.GateOpened():
                self._loops[frame.pipeline].gate_opened(frame.dp_rank, frame.version)


class Loop:
    """One pipeline's side, reduced to what it says."""

    def __init__(self, job: Job, driver: Driver) -> None:
        self._spec = job.spec
        self._id = job.spec.id
        self._driver = driver
        self._seq = self._request = self._version = -1
        self._rolled_out = True

    def _say(self, kind: type[events.Message], **fields: Any) -> None:
        self._seq += 1
        self._driver.say(kind(pipeline=self._id, seq=self._seq, **fields))  # type: ignore[arg-type]

    def _ask(self, priority: Priority) -> None:
        self._request += 1
        self._say(events.LeaseRequested, request=self._request, role=Role.ACTOR_TRAIN, priority=priority)

    def begin(self) -> None:
        self._say(events.PipelineRegistered, spec=self._spec)
        self._say(events.PipelineAdmitted)
        self._ask(Priority.INITIALIZATION)

    def granted(self, epoch: int) -> None:
        """It trains; or it has initialised, the first time."""
        self._version += 1
        self._say(events.WeightsPublished, version=self._version)
        self._driver.steps += self._version > 0
        self._say(events.BatchOpened, batch=self._version, target=TRAJECTORIES)
        self._rolled_out = False
        self._say(events.LeaseReleased, epoch=epoch)

    def gate_opened(self, dp_rank: int, version: int) -> None:
        """It rolls out the whole batch on the first engine that comes, and wants to train."""
        if self._rolled_out or version != self._version:
            return
        self._rolled_out = True
        for i in range(TRAJECTORIES):
            self._say(
                events.TrajectoryCompleted, batch=version, delivered=i + 1, trajectory=i, attempt=0, dp_rank=dp_rank,
                segments=((version, 100),),
            )  # fmt: skip
        self._say(events.BatchClosed, batch=version, reason="taken")
        self._ask(Priority.ACTOR_TRAINING)


UNDECIDED = tuple(
    b'"item":{"type":"%s"' % name.encode()
    for name in ("Note", *(kind.__name__ for kind in get_args(actions.AnyAction)))
)
"""How entries begin, behind their numbers, that came of a decision instead of asking for one."""
