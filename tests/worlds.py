"""Small worlds with round numbers, and hands to work in them: for tests of backends.

Every duration and size below is what the tests count with: all phases take whole seconds, a trajectory takes 10 s.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from backends.sim.backend import SimBackend
from backends.sim.loop import run_sim
from core import actions, events
from core.actions import Emptying
from core.backend import Attempt, Backend, Generation
from core.config import Costs, Durations, Fault, Job, Scenario
from core.model import Cluster, Limits, MemoryNeeds, PipelineSpec, Role, WorkerGroup
from core.units import NS_PER_S, gib

SECOND = NS_PER_S
MEMORY = MemoryNeeds(
    train=gib(40), engine=gib(60), residue=gib(1), init_peak=gib(100), host_cache=gib(2)
)  # fmt: skip
COSTS: dict[str, Any] = {
    "init": 40 * SECOND, "train": 20 * SECOND, "offload": 2 * SECOND, "onload": 2 * SECOND, "publish": 2 * SECOND,
    "sync": 3 * SECOND, "sleep": SECOND, "wake": SECOND, "restart": 30 * SECOND, "log_probs": 5 * SECOND,
    "critic_train": 7 * SECOND, "engine_slots": 4, "trajectory": Durations(parts=((1.0, "constant", 10 * SECOND, 0),)),
}  # fmt: skip
NO_LAG = Durations(parts=((1.0, "constant", 0, 0),))


def constant(seconds: float) -> Durations:
    return Durations(parts=((1.0, "constant", int(seconds * SECOND), 0),))


def make_job(
    name: str = "p1", train: tuple[int, ...] = (0,), infer: tuple[int, ...] = (0, 1), tp: int = 1, **given: Any
) -> Job:
    """A pipeline; keywords override costs, memory or the groups."""
    memory = {key: given.pop(key) for key in MemoryNeeds.__struct_fields__ if key in given}
    groups = [
        WorkerGroup(role=Role.ACTOR_TRAIN, gpus=train),
        WorkerGroup(role=Role.ACTOR_INFER, gpus=infer, tp=tp),
        *given.pop("more_groups", ()),
    ]
    fields = {key: getattr(MEMORY, key) for key in MemoryNeeds.__struct_fields__}
    spec = PipelineSpec(
        id=name,
        groups=tuple(groups),
        limits=Limits(**dict.fromkeys(Limits.__struct_fields__, 600 * SECOND)),
        memory=MemoryNeeds(**(fields | memory)),
    )
    return Job(spec=spec, steps=1, target=4, costs=Costs(**(COSTS | given)))


def make_scenario(
    *jobs: Job, faults: tuple[Fault, ...] = (), seed: int = 0, nodes: int = 1, **cluster: Any
) -> Scenario:
    sizes = {"gpus_per_node": 2, "gpu_memory": gib(141), "host_memory": gib(256), "memory_margin": gib(1)}
    return Scenario(
        name="test",
        cluster=Cluster(nodes=nodes, **(sizes | cluster)),
        jobs=jobs or (make_job(),),
        faults=faults,
        seed=seed,
    )


class Hands:
    """Gives orders to one pipeline of a backend, as the service and the pipeline would."""

    def __init__(self, backend: Backend, scenario: Scenario, pipeline: str = "p1") -> None:
        self.backend = backend
        self.pipeline = pipeline
        self.spec = next(job.spec for job in scenario.jobs if job.spec.id == pipeline)
        self.epoch = 1
        self.batch = 0
        self.version = 0
        """What was published when the test began."""
        self.number = 0

    def _next(self) -> int:
        self.number += 1
        return self.number

    async def do(
        self, kind: type[actions.Action], rank: int = 0, epoch: int | None = None, **fields: Any
    ) -> str | None:
        """Perform one engine action: None if it is done, else why not."""
        action = kind(
            action=self._next(), pipeline=self.pipeline, dp_rank=rank,
            epoch=self.epoch if epoch is None else epoch, **fields,
        )  # fmt: skip
        outcome = await self.backend.perform(action)
        assert outcome.action == action.action
        return outcome.reason if isinstance(outcome, events.ActionFailed) else None

    async def wake(self, rank: int = 0, *, cold: bool = False, epoch: int | None = None) -> str | None:
        return await self.do(actions.WakeEngine, rank, epoch, gpus=self.spec.infer.bundle(rank), cold=cold)

    async def sync(
        self, rank: int = 0, version: int | None = None, how: Emptying = Emptying.ABORT, drain: float = 0
    ) -> str | None:
        """To `version`; None: what was published when the test began."""
        version = self.version if version is None else version
        return await self.do(actions.SyncEngine, rank, version=version, emptying=how, drain=int(drain * SECOND))

    async def open(self, rank: int = 0, version: int | None = None, epoch: int | None = None) -> str | None:
        return await self.do(actions.OpenGate, rank, epoch, version=self.version if version is None else version)

    async def sleep(self, rank: int = 0, how: Emptying = Emptying.ABORT, drain: float = 0) -> str | None:
        return await self.do(actions.SleepEngine, rank, emptying=how, drain=int(drain * SECOND))

    async def kill(self, rank: int = 0) -> str | None:
        return await self.do(actions.KillEngine, rank, reason="test")

    async def stop(self) -> events.ActionDone | events.ActionFailed:
        return await self.backend.perform(
            actions.StopPipeline(action=self._next(), pipeline=self.pipeline, reason="test")
        )

    async def memory(
        self, gpus: tuple[int, ...], need: int, expect: int = 0, patience: float = 0, limit: float = 60
    ) -> events.ActionDone | events.ActionFailed:
        return await self.backend.perform(
            actions.AwaitMemory(
                action=self._next(), limit=int(limit * SECOND), gpus=gpus, need=(need,) * len(gpus),
                expect=(max(need, expect),) * len(gpus), patience=int(patience * SECOND),
            )
        )  # fmt: skip

    async def serve(self, rank: int = 0, version: int | None = None) -> None:
        """From asleep, or synced to another version, to routable."""
        assert await self.wake(rank) is None
        assert await self.sync(rank, version) is None
        assert await self.open(rank, version) is None

    async def phase(
        self, phase: Any, role: Role = Role.ACTOR_TRAIN, version: int = -1, epoch: int | None = None
    ) -> None:
        await self.backend.phase(self.pipeline, role, phase, self.epoch if epoch is None else epoch, version)

    async def initialise(self) -> None:
        """As a pipeline begins: workers up, version 0 published, everything asleep."""
        await self.phase("init")
        await self.phase("publish", version=self.version)
        await self.phase("offload")

    async def train(self, version: int) -> None:
        for phase in ("onload", "train"):
            await self.phase(phase)
        await self.phase("publish", version=version)
        await self.phase("offload")

    async def generate(
        self,
        trajectory: int = 0,
        rank: int = 0,
        batch: int | None = None,
        attempt: int = 0,
        prefix: tuple[tuple[int, int], ...] = (),
    ) -> Generation:
        return await self.backend.generate(
            Attempt(
                pipeline=self.pipeline, batch=self.batch if batch is None else batch, trajectory=trajectory,
                attempt=attempt, dp_rank=rank, prefix=prefix,
            )
        )  # fmt: skip

    def start(self, *args: Any, **fields: Any) -> "asyncio.Task[Generation]":
        """The same, in a task of its own."""
        return asyncio.get_running_loop().create_task(self.generate(*args, **fields))


class World(Hands, ABC):
    """Hands in a whole world, with eyes: what the suite of the plugin contract needs of every backend.

    What takes time is waited for by what it leads to. How the world gets there is its own business: the simulator
    advances its clock, a real world looks.
    """

    scenario: Scenario
    seen: list[tuple[int, events.AnyEvent]]
    """What the backend reported, with the time (ns)."""
    updates_in_flight: bool
    """Whether engines take new weights while requests run (`Emptying.KEEP`)."""

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds on the backend's clock."""

    @abstractmethod
    def free(self, gpu: int) -> int:
        """Bytes that a GPU shows free."""

    @abstractmethod
    def used(self) -> int:
        """Bytes in use anywhere, on GPUs and hosts."""

    @abstractmethod
    def engine_bytes(self, rank: int) -> int:
        """Bytes that one engine of this pipeline holds on its first GPU."""

    @abstractmethod
    async def arrived(self) -> None:
        """Until whatever was asked for so far is with whoever it was asked of."""

    @abstractmethod
    async def decoding(self, running: int, waiting: int = 0, rank: int = 0, pipeline: str | None = None) -> None:
        """Until so many requests of an engine have generated something, and so many wait for their turn."""

    @abstractmethod
    async def roll_out(self) -> None:
        """Let there be a batch to train on, where training needs one. Engine 1 may be used for that."""

    @abstractmethod
    async def hang_trainer(self) -> None:
        """From now on the trainer answers nothing."""

    @abstractmethod
    async def left(self) -> list[str]:
        """What is left of everything, once the backend is closed."""

    def peer(self, pipeline: str) -> Hands:
        """Hands in another pipeline."""
        return Hands(self.backend, self.scenario, pipeline)


class SimWorld(World):
    """The simulator."""

    updates_in_flight = True

    backend: SimBackend

    def __init__(self, scenario: Scenario, pipeline: str = "p1", **options: Any) -> None:
        super().__init__(SimBackend(scenario, **options), scenario, pipeline)
        self.scenario = scenario
        self.seen: list[tuple[int, events.AnyEvent]] = []

    def emit(self, event: events.AnyEvent) -> None:
        self.seen.append((self.now_ns, event))

    def events(self, *kinds: type[events.AnyEvent]) -> list[events.AnyEvent]:
        return [event for _, event in self.seen if type(event) in kinds]

    @property
    def now_ns(self) -> int:
        return self.backend.clock.now_ns()

    @property
    def now(self) -> float:
        return self.now_ns / SECOND

    def free(self, gpu: int) -> int:
        return self.backend.world.memory.gpus[gpu].free

    def used(self) -> int:
        """Bytes in use anywhere."""
        memory = self.backend.world.memory
        return sum(device.used for device in (*memory.gpus, *memory.hosts))

    def held(self, gpu: int, owner: str) -> dict[str, int]:
        return {kind.value: size for kind, size in self.backend.world.memory.gpus[gpu].held.get(owner, {}).items()}

    def engine_bytes(self, rank: int) -> int:
        return sum(self.held(self.spec.infer.bundle(rank)[0], f"{self.pipeline}/{rank}").values())

    async def arrived(self) -> None:
        await pass_time(1)

    async def decoding(self, running: int, waiting: int = 0, rank: int = 0, pipeline: str | None = None) -> None:
        await pass_time(1)
        engine = self.backend.crew(pipeline or self.pipeline).engine(rank)
        assert engine is not None
        assert (len(engine.running), len(engine.waiting)) == (running, waiting)

    async def roll_out(self) -> None:
        """Training needs no samples."""

    async def hang_trainer(self) -> None:
        self.backend.crew(self.pipeline).actor.hang()

    async def left(self) -> list[str]:
        await pass_time(1000)
        return [f"{self.used()} bytes"] if self.used() else []


def in_sim(scenario: Scenario, test: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """Run `test(world)` in a simulated world, opened before and closed after."""

    async def main() -> Any:
        world = SimWorld(scenario, **options)
        await world.backend.open(world.emit)
        try:
            return await test(world)
        finally:
            await world.backend.close()

    return run_sim(main)


async def pass_time(seconds: float) -> None:
    await asyncio.get_running_loop().sleep_ns(int(seconds * SECOND))  # type: ignore[attr-defined]
