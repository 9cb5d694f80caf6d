"""The workers of one pipeline: trainer ranks, engines and the desk, found by name and commanded one by one.

Launching them is part of initialisation: the pipeline holds all of its GPUs then. After it the trainer is loaded and
every engine sleeps. An engine that died is started again by a cold wake, on the same GPUs.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from backends.ray_gpu import wire
from backends.ray_gpu.failures import first_line
from backends.ray_gpu.meeting import LOOPBACK
from backends.ray_gpu.places import DESK, Places, engine_name, namespace_of, trainer_name
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.workers.desk import Desk
from backends.ray_gpu.workers.engine import EngineWorker
from backends.ray_gpu.workers.environment import environment
from backends.ray_gpu.workers.trainer import TrainerWorker
from core import actions, events
from core.errors import OperationFailed
from core.model import Cluster, Role

ENGINE_THREADS = 16
"""Calls an engine answers beside the requests it serves."""
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Crew:
    def __init__(
        self,
        plan: CrewPlan,
        fleet: Any,
        places: Places,
        cluster: Cluster,
        emit: Callable[[events.AnyEvent], None],
        start: Callable[[Any], None],
    ) -> None:
        self.plan = plan
        self.id = plan.id
        self._fleet = fleet
        self._places = places
        self._cluster = cluster
        self._emit = emit
        self._start = start
        self._workers: dict[str, Any] = {}
        """Living workers by name."""
        self._source = cluster.node_of(plan.train_gpus[0])
        """The node where weights are published."""

    @property
    def nodes(self) -> list[int]:
        """Nodes of its GPUs, ascending."""
        return sorted({self._cluster.node_of(gpu) for gpu in self.plan.job.spec.union})

    def _names(self) -> dict[str, int]:
        """Every worker it should have, and its node."""
        spec = self.plan.job.spec
        names = {
            trainer_name(Role.ACTOR_TRAIN, rank): self._cluster.node_of(gpu)
            for rank, gpu in enumerate(self.plan.train_gpus)
        }
        names |= {engine_name(rank): self._engine_node(rank) for rank in range(spec.infer.size)}
        return names | {DESK: self._source}

    def _engine_node(self, rank: int) -> int:
        return self._cluster.node_of(self.plan.job.spec.infer.bundle(rank)[0])

    def adopt(self) -> None:
        """Take over workers that live already: this process may not be the first."""
        for name in self._names():
            with suppress(ValueError):
                self._keep(name, ray.get_actor(name, namespace_of(self.id)))

    def _keep(self, name: str, handle: Any) -> None:
        self._workers[name] = handle
        self._start(self._watch(name, handle))

    async def _watch(self, name: str, handle: Any) -> None:
        """Wait for the worker's death, and report it unless we killed it."""
        try:
            await handle.live.remote()
            why = "it ended by itself"
        except ray.exceptions.RayError as error:
            why = first_line(error)
        if self._workers.get(name) is not handle:
            return  # ours
        del self._workers[name]
        await self._reap(name)
        if name.startswith("engine-"):
            self._emit(events.EngineDied(pipeline=self.id, dp_rank=int(name.partition("-")[2]), reason=why))
        else:
            self._emit(events.TrainerFailed(pipeline=self.id, reason=f"its {name} died: {why}"))

    async def _reap(self, name: str) -> None:
        """End what is left of a worker's process tree."""
        with suppress(ray.exceptions.RayError):
            await self._fleet.agent(self._names()[name]).kill.remote(self.id, name)

    def node_left(self, node: int) -> None:
        """Everything on the node is gone; the scheduler hears of the node, not of each worker."""
        for name, where in self._names().items():
            if where == node:
                self._workers.pop(name, None)

    # --- launch ----------------------------------------------------------------------------------------

    async def launch(self, epoch: int) -> None:
        """Start every worker and load it. Raises OperationFailed; what was started then is ended by the stop that
        follows a failed pipeline."""
        if set(self._workers) == set(self._names()):
            return  # doubled
        await asyncio.gather(*(self._fleet.agent(node).clear.remote(self.id) for node in self.nodes))
        spec = self.plan.job.spec
        agent = self._fleet.agent(self._source)
        (port,) = await agent.free_ports.remote(1)
        meeting = (LOOPBACK if self._trains_on_one_node else self._fleet.address(self._source), port)
        trainers = [self._make_trainer(rank, meeting, epoch) for rank in range(len(self.plan.train_gpus))]
        engines = [await self._make_engine(rank) for rank in range(spec.infer.size)]
        desk = self._make(DESK, Desk, self._source, (), 1000, self.plan, self._places.session)
        built = [*(worker.build.remote() for worker in trainers), *(worker.build.remote() for worker in engines)]
        await _all([*built, desk.open.remote()], self.id)

    @property
    def _trains_on_one_node(self) -> bool:
        return len({self._cluster.node_of(gpu) for gpu in self.plan.train_gpus}) == 1

    def _make_trainer(self, rank: int, meeting: tuple[str, int], epoch: int) -> Any:
        name = trainer_name(Role.ACTOR_TRAIN, rank)
        gpu = self.plan.train_gpus[rank]
        node = self._cluster.node_of(gpu)
        return self._make(
            name, TrainerWorker, node, (gpu,), 4, self.plan, self._places.session, rank, meeting, self._budgets(node),
            epoch, self._fleet.uuid(gpu),
        )  # fmt: skip

    async def _make_engine(self, rank: int) -> Any:
        node, gpus = self._engine_node(rank), self.plan.job.spec.infer.bundle(rank)
        ports = await self._fleet.agent(node).free_ports.remote(1)
        threads = self.plan.job.costs.engine_slots + ENGINE_THREADS
        return self._make(
            engine_name(rank), EngineWorker, node, gpus, threads, self.plan, self._places.session, rank, ports[0],
            self._budgets(node),
        )  # fmt: skip

    def _budgets(self, node: int) -> dict[int, int]:
        size = self._cluster.gpus_per_node
        return dict.fromkeys(range(node * size, (node + 1) * size), self._cluster.gpu_memory)

    def _make(self, name: str, kind: type, node: int, gpus: tuple[int, ...], threads: int, *arguments: Any) -> Any:
        one_node = self._trains_on_one_node or kind is not TrainerWorker
        handle = (
            ray.remote(kind)
            .options(
                name=name, namespace=namespace_of(self.id), lifetime="detached", max_restarts=0, num_cpus=0,
                num_gpus=0, max_concurrency=threads, scheduling_strategy=self._fleet.affinity(node),
                runtime_env={"env_vars": environment(self.plan, self._fleet.physical(gpus), name, one_node=one_node)},
            )
            .remote(*arguments)
        )  # fmt: skip
        self._keep(name, handle)
        return handle

    # --- engines ---------------------------------------------------------------------------------------

    async def obey(self, action: actions.EngineAction) -> None:
        """Carry out an action on one engine. Raises OperationFailed."""
        name = engine_name(action.dp_rank)
        if not 0 <= action.dp_rank < self.plan.job.spec.infer.size:
            raise OperationFailed(f"there is no engine {self.id}/{action.dp_rank}")
        if isinstance(action, actions.KillEngine):
            await self._kill(name)
            return
        if isinstance(action, actions.WakeEngine) and action.cold:
            await self._start_again(action.dp_rank)
        handle = self._workers.get(name)
        if handle is None:
            raise OperationFailed(
                f"{self.id} has no workers" if not self._workers else f"{self.id}/{name} is not running"
            )
        if isinstance(action, actions.SyncEngine):
            await self._bring_weights(action.version, self._engine_node(action.dp_rank))
        failure = await handle.obey.remote(wire.pack(action))
        if failure is not None:
            raise OperationFailed(failure)

    async def _kill(self, name: str) -> None:
        handle = self._workers.pop(name, None)
        await self._reap(name)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    async def _start_again(self, rank: int) -> None:
        name = engine_name(rank)
        await self._kill(name)
        handle = await self._make_engine(rank)
        await _all([handle.build.remote()], self.id)

    async def _bring_weights(self, version: int, node: int) -> None:
        """Make sure that a node's cache has a version, copying the buckets it lacks from where it was published."""
        if node == self._source:
            return
        there, here = self._fleet.agent(self._source), self._fleet.agent(node)
        manifest = await there.manifest.remote(self.id, version)
        for index in await here.missing.remote(manifest):
            await here.receive.remote(self.id, version, index, there.bucket.remote(manifest, index))

    # --- the end, and harm ------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End every worker and drop the weights."""
        workers, self._workers = self._workers, {}
        for handle in workers.values():
            ray.kill(handle, no_restart=True)
        for node in self.nodes:
            with suppress(ray.exceptions.RayError):
                await self._fleet.agent(node).clear.remote(self.id)

    async def inject(self, kind: str, dp_rank: int) -> None:
        """Fault injection: `kill_engine`, `hang_engine`, `kill_trainer` or `hang_trainer`. Raises OperationFailed."""
        verb, _, target = kind.partition("_")
        name = engine_name(dp_rank) if target == "engine" else trainer_name(Role.ACTOR_TRAIN, 0)
        if verb not in SIGNALS or name not in self._names():
            raise OperationFailed(f"{kind} cannot be done to {self.id}")
        found = await self._fleet.agent(self._names()[name]).signal.remote(self.id, name, int(SIGNALS[verb]))
        if not found:
            raise OperationFailed(f"{self.id}/{name} is not running")


async def _all(refs: list[Any], pipeline: str) -> None:
    """Wait for all; the first failure as OperationFailed."""
    try:
        await asyncio.gather(*refs)
    except ray.exceptions.RayError as error:
        raise OperationFailed(f"{pipeline} could not start: {first_line(error)}") from error
