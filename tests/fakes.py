"""Small stand-ins for what surrounds the client side: a backend, a port, a service; for `backends.sim.loop.run_sim`.

They grant everything at once and record what was said; a test changes the attribute that matters to it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import anyio

from core import events
from core.backend import Attempt, Generation
from core.config import Costs, Durations, Job, Trigger
from core.errors import OperationFailed
from core.model import Limits, PipelineSpec, Priority, Record, Role, WorkerGroup
from core.units import NS_PER_S


def make_job(name: str = "p1", **given: Any) -> Job:
    """A job of one GPU that trains and one engine on each of two; keywords override fields of the job or its spec."""
    second = NS_PER_S
    spec_fields = {key: given.pop(key) for key in list(given) if key in PipelineSpec.__struct_fields__}
    spec = {
        "id": name,
        "groups": (
            WorkerGroup(role=Role.ACTOR_TRAIN, gpus=(0,)),
            WorkerGroup(role=Role.ACTOR_INFER, gpus=(0, 1)),
        ),
        "limits": Limits(**{field: 600 * second for field in Limits.__struct_fields__}),
    }
    costs = dict.fromkeys(("init", "train", "offload", "onload", "publish", "sync", "sleep", "wake", "restart"), second)
    job = {"steps": 2, "target": 4, "costs": Costs(**costs, trajectory=Durations())}
    return Job(**(job | {"spec": PipelineSpec(**(spec | spec_fields))} | given))


class FakeClock:
    def now_ns(self) -> int:
        return asyncio.get_running_loop().now_ns()

    def call_at_ns(self, when_ns: int, callback: Callable[[], None], *, daemon: bool = False) -> Any:
        return asyncio.get_running_loop().call_at_ns(when_ns, callback, daemon=daemon)


class Request:
    """A trajectory being generated; `end` decides how it ends."""

    def __init__(self, attempt: Attempt, version: int) -> None:
        self.attempt = attempt
        self.version = version
        self.ended = anyio.Event()
        self.generation: Generation | None = None

    def end(self, status: str, tokens: int = 1, reason: str = "") -> None:
        if self.generation is None:
            segments = (*self.attempt.prefix, (self.version, tokens))
            self.generation = Generation(status=status, segments=segments, reason=reason)
            self.ended.set()


class FakeBackend:
    """Engines that serve what is sent to them while their gate is open, and complain otherwise."""

    name = "fake"

    def __init__(self, *, slots: int = 4, takes: int | None = NS_PER_S, phase_takes: int = NS_PER_S) -> None:
        self.clock = FakeClock()
        self.slots_each = slots
        self.takes = takes
        """ns until a request completes by itself; None: the test ends it."""
        self.phase_takes = phase_takes
        self.phases: list[tuple[str, str, str, int]] = []
        self.broken_phases: dict[tuple[str, str], Exception] = {}
        self.hanging_phases: list[tuple[str, str]] = []
        self.versions: dict[tuple[str, int], int] = {}
        """Open gates: (pipeline, dp_rank) -> version."""
        self.running: list[Request] = []
        self.attempts: list[Attempt] = []
        self.served: dict[tuple[int, int, int], int] = {}
        """Version each (batch, trajectory, attempt) was dispatched on."""

    def slots(self, pipeline: str) -> int:
        return self.slots_each

    async def generate(self, attempt: Attempt) -> Generation:
        engine = (attempt.pipeline, attempt.dp_rank)
        assert engine in self.versions, f"{attempt} was sent to an engine whose gate is closed"
        request = Request(attempt, self.versions[engine])
        self.attempts.append(attempt)
        self.served[attempt.batch, attempt.trajectory, attempt.attempt] = request.version
        self.running.append(request)
        try:
            if self.takes is not None:
                timer = self.clock.call_at_ns(self.clock.now_ns() + self.takes, lambda: request.end("completed"))
                await request.ended.wait()
                timer.cancel()
            else:
                await request.ended.wait()
        finally:
            self.running.remove(request)
        assert request.generation is not None
        return request.generation

    def on(self, rank: int, pipeline: str = "p1") -> list[Request]:
        """What runs on an engine."""
        return [r for r in self.running if (r.attempt.pipeline, r.attempt.dp_rank) == (pipeline, rank)]

    def end_all(self, status: str, rank: int, pipeline: str = "p1") -> None:
        for request in self.on(rank, pipeline):
            request.end(status)

    async def phase(self, pipeline: str, role: Role, phase: str, epoch: int, version: int = -1) -> None:
        self.phases.append((pipeline, role.value, phase, version))
        if (pipeline, phase) in self.hanging_phases:
            await anyio.sleep_forever()
        await asyncio.get_running_loop().sleep_ns(self.phase_takes)
        if (pipeline, phase) in self.broken_phases:
            raise self.broken_phases[pipeline, phase]


class FakeLease(Record, frozen=True, kw_only=True):
    epoch: int
    gpus: tuple[int, ...]


class FakePort:
    """Grants at once, wakes every engine as soon as weights are published, syncs them when they lag too far behind.

    `said` is everything that was told to the scheduler, in order, as (message, fields...)."""

    def __init__(self, pipeline: str, backend: FakeBackend, engines: int = 2) -> None:
        self.pipeline = pipeline
        self.backend = backend
        self.engines = engines
        self.gates: Any = None
        self.said: list[tuple[Any, ...]] = []
        self.told: list[events.AnyEvent] = []
        self.held: list[FakeLease] = []
        self.refused: dict[str, Exception] = {}
        self.leaving_takes = NS_PER_S
        self.epochs = 0
        self.spec: PipelineSpec | None = None

    def words(self) -> list[str]:
        return [said[0] for said in self.said]

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    async def register(self, spec: PipelineSpec) -> None:
        await self._answer("register")
        self.spec = spec

    async def admit(self) -> None:
        await self._answer("admit")

    async def request(self, role: Role, priority: Priority) -> FakeLease:
        await self._answer("request", priority.name)
        self.epochs += 1
        assert self.spec is not None
        group = self.spec.group(role)
        assert group is not None
        lease = FakeLease(epoch=self.epochs, gpus=group.gpus)
        self.held.append(lease)
        return lease

    async def release_and_request(self, lease: FakeLease, role: Role, priority: Priority) -> FakeLease:
        self.held.remove(lease)
        self.said.append(("release_and",))
        return await self.request(role, priority)

    def release(self, lease: FakeLease) -> None:
        self.held.remove(lease)
        self.said.append(("release",))

    async def _answer(self, *words: Any) -> None:
        self.said.append(words)
        await anyio.lowlevel.checkpoint()
        if words[0] in self.refused:
            raise self.refused[words[0]]

    def batch_opened(self, batch: int, target: int, kind: Any) -> None:
        self.said.append(("batch_opened", batch, target, kind.value))

    def rollout_signal(self, batch: int) -> None:
        self.said.append(("rollout_signal", batch))

    def batch_closed(self, batch: int, reason: str) -> None:
        self.said.append(("batch_closed", batch, reason))

    def trajectory_completed(
        self, batch: int, delivered: int, trajectory: int, attempt: int, dp_rank: int, segments: Any
    ) -> None:
        self.said.append(("trajectory_completed", batch, delivered, trajectory, attempt, dp_rank, segments))

    def demand_changed(self, batch: int, target: int, delivered: int, reason: str) -> None:
        self.said.append(("demand_changed", batch, target, delivered, reason))

    def engine_suspected(self, dp_rank: int, reason: str) -> None:
        self.said.append(("engine_suspected", dp_rank))

    def weights_published(self, version: int) -> None:
        self.said.append(("weights_published", version))
        asyncio.get_running_loop().call_soon(self._sync, version)

    def _sync(self, latest: int) -> None:
        assert self.spec is not None
        for rank in range(self.engines):
            if latest - self.backend.versions.get((self.pipeline, rank), -100) > self.spec.staleness:
                self.open_engine(rank, latest)

    def open_engine(self, rank: int, version: int, epoch: int = 0) -> None:
        """Sync an engine: close its gate, abort what it runs, open the gate at `version`."""
        self.close_engine(rank)
        self.backend.versions[self.pipeline, rank] = version
        self.gates.open_gate(rank, version, epoch)

    def close_engine(self, rank: int) -> None:
        self.gates.close_gate(rank)
        self.backend.versions.pop((self.pipeline, rank), None)
        self.backend.end_all("aborted", rank, self.pipeline)

    async def leave(self, error: str | None) -> None:
        self.said.append(("leave", error))
        await asyncio.get_running_loop().sleep_ns(self.leaving_takes)
        self.held.clear()
        self.said.append(("left",))

    def close(self) -> None:
        self.said.append(("closed",))

    def tell(self, event: events.AnyEvent) -> None:
        self.told.append(event)


class FakeService:
    """Connects pipelines to fake ports; a test says when a trigger happened."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.ports: dict[str, FakePort] = {}
        self.triggers: dict[Trigger, anyio.Event] = defaultdict(anyio.Event)

    def connect(self, pipeline: str) -> FakePort:
        self.ports[pipeline] = FakePort(pipeline, self.backend)
        return self.ports[pipeline]

    async def happened(self, trigger: Trigger) -> None:
        await self.triggers[trigger].wait()


def broken(text: str = "it broke") -> OperationFailed:
    return OperationFailed(text)
