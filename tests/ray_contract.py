"""The real backend, on CPU, as a world for the suite of the plugin contract: a cluster, a control plane, node agents,
trainers, engines, a driver. Nothing is imitated; only the orders come from the test instead of the scheduler.

1. One cluster serves all tests of a module, and the workers of `p1` stay between them: starting a process with torch
   takes seconds. A test finds everything as after an initialisation, under epochs, a batch and versions of its own.
2. The model never says that it is done, so that a trajectory lasts until its limit: hundreds of steps, in which a test
   can look and act. What a test waits for is looked for, not slept for.
3. A test that leaves something behind that is not as it should be costs the next one a new start, not a failure.
"""

import asyncio
import itertools
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ray_world import ROOT, Place, marked

from backends.ray_gpu import cluster
from backends.ray_gpu.backend import RayBackend
from backends.ray_gpu.devices.slots import Slots
from backends.ray_gpu.models import tiny
from backends.ray_gpu.models.byte_tokenizer import END
from backends.ray_gpu.places import Places, engine_name, namespace_of, owner
from backends.ray_gpu.weights.store import held_by_pipeline
from core import actions, events
from core.backend import Outcome
from core.config import Scenario
from core.errors import OperationFailed
from core.model import Role
from core.units import gib
from core.workload import Workload
from tests.worlds import Hands, World, make_job, make_scenario

LIMIT_S = 150.0
"""For one test, and as much for what has to be started before it: many times what it takes on a machine that does
nothing else."""
LOOK_S = 0.005
MOST_TOKENS = 500
"""Of each trajectory."""
POSITIONS = 1024
SLOTS = 4
KV_TOKENS = 2 * SLOTS * POSITIONS
HEARTBEAT_S = 3600.0
"""The driver is silent while tests of other backends run."""
EPOCHS = 100
"""More than a test uses."""

Test = Callable[[Any], Awaitable[Any]]


class Backend(RayBackend):
    """With a door for orders."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, device="cpu", heartbeat_s=HEARTBEAT_S)
        self._numbers = itertools.count()
        self._hung_up = asyncio.Event()
        self._line: asyncio.Task[None] | None = None

    @property
    def control(self) -> Any:
        return self._joined.control

    @property
    def closed(self) -> bool:
        return self._left

    async def connect(self, emit: Callable[[events.AnyEvent], None]) -> None:
        """As a run does it: the session first, then the backend."""
        session = self.session([lambda i, t_ns, cause, item: emit(item)], lambda now: None)

        async def listen() -> None:
            async with session:
                await self._hung_up.wait()

        self._line = asyncio.create_task(listen())
        await self.open(emit)

    async def close(self) -> None:
        self._hung_up.set()
        if self._line is not None:
            await self._line
        await super().close()

    async def perform(self, action: actions.BACKEND | actions.OpenGate) -> Outcome:
        """Have the control plane's fleet carry it out. Cancelled: the order is given up there."""
        from ray_bench import RayError, outcome_of

        if self._left:
            return events.ActionFailed(action=action.action, reason="the control plane is gone")
        number = next(self._numbers)
        try:
            packed = await self._answer(self.control.perform.remote(number, msgspec.msgpack.encode(action)))
        except (OperationFailed, RayError) as error:
            return events.ActionFailed(action=action.action, reason=str(error).splitlines()[0])
        except asyncio.CancelledError:
            self.control.give_up.remote(number)
            raise
        assert packed is not None, "only a cancelled order is given up"
        return outcome_of(packed)

    def taken(self, event: events.BatchTaken) -> None:
        """A pipeline's message passes by, as it does on its way to the control plane."""
        self._told(event)

    async def inject(self, kind: str, pipeline: str) -> None:
        failure = await self.control.inject.remote(kind, pipeline, -1)
        assert failure is None, failure


class RayWorld(World):
    updates_in_flight = False

    backend: Backend

    def __init__(self, place: Place, scenario: Scenario) -> None:
        backend = Backend(scenario)
        super().__init__(backend, backend.scenario)
        self.scenario = backend.scenario
        self.seen = []
        self.whole = False
        """The workers are there, and do as they are told."""
        self._place = place
        self._places = Places(place.session())
        self._engines: dict[tuple[str, int], Any] = {}
        self._peers: dict[str, Hands] = {}
        self._batches = itertools.count()
        self._samples = False
        """There is a batch that nothing was trained on yet."""
        self._published = -1

    def emit(self, event: events.AnyEvent) -> None:
        self.seen.append((self.backend.clock.now_ns(), event))

    # --- between tests -----------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Everything as after initialisation, whatever an earlier test did."""
        self.epoch += EPOCHS
        self.batch = next(self._batches)
        for peer in self._peers.values():
            await peer.stop()
        self._peers.clear()
        self.whole = self.whole and await self._rest()
        if not self.whole:
            await self.stop()
            self._published += 1
            self._samples = False
        self.version = self._published
        if not self.whole:
            await self.initialise()
            self.whole = True

    async def _rest(self) -> bool:
        """Trainer offloaded, engines asleep; whether that could be had."""
        try:
            await self.phase("offload")
        except OperationFailed:
            return False
        for rank in range(self.spec.infer.size):
            if await self.sleep(rank) is not None and (await self.wake(rank, cold=True) or await self.sleep(rank)):
                return False
        return True

    # --- what pipelines do -------------------------------------------------------------------------------

    def peer(self, pipeline: str) -> Hands:
        peer = self._peers[pipeline] = super().peer(pipeline)
        peer.epoch, peer.batch = self.epoch, self.batch
        return peer

    async def roll_out(self) -> None:
        """On engine 1, which sleeps before and after."""
        if self._samples:
            return
        job = self.scenario.jobs[0]
        batch, trajectories = next(self._batches), tuple(range(job.target))
        await self.serve(1)
        made = [self.start(trajectory, rank=1, batch=batch) for trajectory in trajectories]
        assert {(await one).status for one in made} == {"completed"}
        assert await self.sleep(1) is None
        stale = (0,) * len(trajectories)
        self.backend.taken(
            events.BatchTaken(
                pipeline=self.pipeline, batch=batch, version=self.version, trajectories=trajectories, staleness=stale
            )
        )
        self._samples = True

    async def phase(
        self, phase: Any, role: Role = Role.ACTOR_TRAIN, version: int = -1, epoch: int | None = None
    ) -> None:
        await super().phase(phase, role, version, epoch)
        if phase == "train":
            self._samples = False

    async def train(self, version: int) -> None:
        await self.roll_out()
        await super().train(version)
        self._published = version

    async def hang_trainer(self) -> None:
        self.whole = False
        await self.backend.inject("hang_trainer", self.pipeline)

    async def stop(self) -> events.ActionDone | events.ActionFailed:
        self.whole = False
        return await super().stop()

    # --- eyes --------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.backend.clock.now_ns() / 1e9

    def _held(self, gpu: int) -> dict[str, int]:
        """Bytes by owner, as everybody on this machine sees them."""
        if not self._places.slots.is_dir():
            return {}
        found: dict[str, int] = {}
        for holding in Slots(self._places.slots, {gpu: self.scenario.cluster.gpu_memory}).holders(gpu):
            found[holding.owner] = found.get(holding.owner, 0) + holding.nbytes
        return found

    def free(self, gpu: int) -> int:
        return self.scenario.cluster.gpu_memory - sum(self._held(gpu).values())

    def used(self) -> int:
        on_gpus = sum(sum(self._held(gpu).values()) for gpu in range(self.scenario.cluster.gpus_per_node))
        return on_gpus + sum(held_by_pipeline(self._places.memory).values())

    def engine_bytes(self, rank: int) -> int:
        return self._held(self.spec.infer.bundle(rank)[0]).get(owner(self.pipeline, engine_name(rank)), 0)

    async def arrived(self) -> None:
        # Twice: what led to an answer the first time has been answered before the second.
        await self.backend.control.arrived.remote()
        await self.backend.control.arrived.remote()

    async def decoding(self, running: int, waiting: int = 0, rank: int = 0, pipeline: str | None = None) -> None:
        import ray
        from ray_bench import tokens_in_flight

        engine = ray.get_actor(engine_name(rank), namespace_of(pipeline or self.pipeline))
        end = time.monotonic() + LIMIT_S
        while True:
            tokens = await tokens_in_flight(engine)
            begun = sum(found > 0 for found in tokens)
            if (begun, len(tokens) - begun) == (running, waiting):
                return
            assert time.monotonic() < end, f"{running} were to run and {waiting} to wait; tokens: {tokens}"
            await asyncio.sleep(LOOK_S)

    async def left(self) -> list[str]:
        """Processes, files, memory. Ray's own daemons take a moment to end."""
        end = time.monotonic() + LIMIT_S
        while (found := self._left()) and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        return found

    def _left(self) -> list[str]:
        folders = [str(folder) for folder in (self._places.disk, self._places.memory) if folder.exists()]
        return [*marked(self._place.mark).values(), *folders]


class House:
    """Keeps a world between tests, and makes another when a test closed it."""

    def __init__(self, cache: Path) -> None:
        self._stack = ExitStack()
        self._place = self._stack.enter_context(Place(cache))
        self._stack.enter_context(_environment(self._place))
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._scenario = _scenario(_endless_model(cache / "endless"))
        self._world: RayWorld | None = None

    def run(self, test: Test) -> Any:
        """Run `test(world)` in the world, as it is after initialisation."""
        if self._world is None:
            self._world = self._open()
        return self._runner.run(self._in_world(self._world, test))

    def _open(self) -> RayWorld:
        from ray_bench import Bench

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("backends.ray_gpu.joining.ControlPlane", Bench)
            world = RayWorld(self._place, self._scenario)
        self._runner.run(world.backend.connect(world.emit))
        return world

    async def _in_world(self, world: RayWorld, test: Test) -> Any:
        before = asyncio.all_tasks()
        try:
            await asyncio.wait_for(world.prepare(), LIMIT_S)
            return await asyncio.wait_for(test(world), LIMIT_S)
        except BaseException:
            world.whole = False
            raise
        finally:
            await _end(asyncio.all_tasks() - before)
            if world.backend.closed:
                self._world = None

    def close(self) -> None:
        with self._stack:
            if self._world is not None:
                self._runner.run(self._world.backend.close())


async def _end(tasks: set["asyncio.Task[Any]"]) -> None:
    """Nothing of a test goes on in the next one."""
    tasks.discard(asyncio.current_task())  # type: ignore[arg-type]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _environment(place: Place) -> Iterator[None]:
    """This process's environment is what Ray's daemons and all workers inherit. Ray reads some of it when it is
    imported, and takes SIGTERM for itself."""
    before, folder, handler = dict(os.environ), tempfile.tempdir, signal.getsignal(signal.SIGTERM)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    path = os.pathsep.join(str(found) for found in (ROOT, ROOT / "tests"))
    os.environ.clear()
    os.environ.update(place.environment | cluster.QUIET | cluster.MUTE | token | {"PYTHONPATH": path})
    tempfile.tempdir = str(place.folder)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        tempfile.tempdir = folder
        os.environ.clear()
        os.environ.update(before)


def _scenario(model: Path) -> Scenario:
    workload = Workload(model=str(model), max_tokens=MOST_TOKENS, kv_tokens=KV_TOKENS)
    jobs = [make_job("p1", engine_slots=SLOTS), make_job("p2", train=(1,), infer=(1,), engine_slots=SLOTS)]
    jobs = [msgspec.structs.replace(job, workload=workload, target=2, samples_per_prompt=2) for job in jobs]
    return make_scenario(*jobs, gpu_memory=gib(1), host_memory=gib(4), memory_margin=0)


def _endless_model(folder: Path) -> Path:
    """The tiny model, changed so that its end token is never drawn, whatever it is asked and however it is trained in a
    step or two: the first value of each hidden state is a constant that nothing adds to, and the end token's logit is
    that times a large negative number."""
    import json

    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tiny.build(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    weights["lm_head.weight"][END, 0] = -100
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(tiny.config() | {"max_position_embeddings": POSITIONS}))
    return folder
