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
from backends.ray_gpu.ways import direct_ranks, ways_of
from backends.ray_gpu.workers.desk import Desk
from backends.ray_gpu.workers.engine import EngineWorker
from backends.ray_gpu.workers.environment import environment
from backends.ray_gpu.workers.trainer import TrainerWorker
from core import actions, events
from core.errors import OperationFailed, StaleLease
from core.model import Cluster, Role

ENGINE_THREADS = 16
"""Calls an engine answers beside the requests it serves."""
LENDING_THREADS = 3
"""Calls that one engine may have under way at a trainer that lends it weights."""
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
        self._stops = 0
        """How often it was stopped: whoever waits while it starts something looks whether it still may."""
        self._epochs: dict[int, int] = {}
        """Of the last order to each engine. Its process knows too, but cannot be asked once it hangs, and a cold start
        forgets."""
        self._starting = [asyncio.Lock() for _ in range(plan.job.spec.infer.size)]
        """Of each engine: held while it is started again."""
        self._source = cluster.node_of(plan.train_gpus[0])
        """The node where weights are published."""
        self._ways = ways_of(plan, cluster, fleet.cards)

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
        for name in self._names():
            if name not in self._workers:
                self._give_back(name)

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
        """End what is left of a worker's process tree, and give back what it borrowed."""
        with suppress(ray.exceptions.RayError):
            await self._fleet.agent(self._names()[name]).kill.remote(self.id, name)
        self._give_back(name)

    def _give_back(self, name: str) -> None:
        """An engine that is gone needs none of the trainer's memory; the trainer would wait for it."""
        trainer = self._workers.get(trainer_name(Role.ACTOR_TRAIN, 0))
        if name.startswith("engine-") and trainer is not None and direct_ranks(self._ways):
            trainer.give_back.remote(name, True)

    def node_left(self, node: int) -> None:
        """Everything on the node is gone; the scheduler hears of the node, not of each worker."""
        for name, where in self._names().items():
            if where == node:
                self._workers.pop(name, None)
                self._give_back(name)

    # --- launch ----------------------------------------------------------------------------------------

    async def launch(self, epoch: int) -> None:
        """Start every worker and load it. Raises OperationFailed; what was started then is ended by the stop that
        follows a failed pipeline.

        A client whose control plane died meanwhile asks again. Workers that were all started load only once, and are
        waited for; a crew that is not whole starts over, because ranks meet where their first one was told to.
        """
        if set(self._workers) != set(self._names()):
            await self._make_all(epoch)
        await asyncio.gather(*(self._load(name, worker) for name, worker in self._workers.items()))

    async def _make_all(self, epoch: int) -> None:
        stops = self._stops + 1
        await self.stop()
        meeting_port, *engine_ports = await asyncio.gather(
            self._meeting_port(),
            *(self._free_port(self._engine_node(rank)) for rank in range(self.plan.job.spec.infer.size)),
        )
        self._check_goes_on(stops)
        meeting = (LOOPBACK if self._trains_on_one_node else self._fleet.address(self._source), meeting_port)
        for rank in range(len(self.plan.train_gpus)):
            self._make_trainer(rank, meeting, epoch)
        for rank, port in enumerate(engine_ports):
            self._make_engine(rank, port)
        self._make(DESK, Desk, self._source, (), 1000, self.plan, self._places.session)

    def _check_goes_on(self, stops: int) -> None:
        """Raises OperationFailed if it was stopped meanwhile."""
        if self._stops != stops:
            raise OperationFailed(f"{self.id} was stopped while its workers were being started")

    async def _meeting_port(self) -> int:
        """Where the trainer's ranks meet. A port that is free now may be taken by the time it is used, which is seconds
        later, so a rank that meets nobody takes whichever is free then (0)."""
        return 0 if len(self.plan.train_gpus) == 1 else await self._free_port(self._source)

    async def _free_port(self, node: int) -> int:
        (port,) = await self._fleet.agent(node).free_ports.remote(1)
        return port

    async def _load(self, name: str, worker: Any) -> None:
        """Wait until a worker is ready. Raises OperationFailed, with its name."""
        try:
            await worker.build.remote()
        except ray.exceptions.RayError as error:
            raise OperationFailed(f"{self.id} could not start: {name}: {first_line(error)}") from error

    @property
    def _trains_on_one_node(self) -> bool:
        return len({self._cluster.node_of(gpu) for gpu in self.plan.train_gpus}) == 1

    def _make_trainer(self, rank: int, meeting: tuple[str, int], epoch: int) -> Any:
        name = trainer_name(Role.ACTOR_TRAIN, rank)
        gpu = self.plan.train_gpus[rank]
        node = self._cluster.node_of(gpu)
        direct = direct_ranks(self._ways) if rank == 0 else ()
        return self._make(
            name, TrainerWorker, node, (gpu,), 4 + LENDING_THREADS * len(direct), self.plan, self._places.session, rank,
            meeting, self._budgets(node), epoch, self._fleet.uuid(gpu), bool(direct),
        )  # fmt: skip

    def _make_engine(self, rank: int, port: int) -> Any:
        node, gpus = self._engine_node(rank), self.plan.job.spec.infer.bundle(rank)
        threads = self.plan.job.costs.engine_slots + ENGINE_THREADS
        return self._make(
            engine_name(rank), EngineWorker, node, gpus, threads, self.plan, self._places.session, rank, port,
            self._budgets(node), self._ways[rank],
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
        """Carry out an action on one engine. Raises OperationFailed, or StaleLease for an older epoch than before."""
        name = engine_name(action.dp_rank)
        if not 0 <= action.dp_rank < self.plan.job.spec.infer.size:
            raise OperationFailed(f"there is no engine {self.id}/{action.dp_rank}")
        self._check_epoch(action)
        if isinstance(action, actions.KillEngine):
            await self._kill(name)
            return
        if isinstance(action, actions.WakeEngine) and action.cold and self._workers:
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
        if isinstance(action, actions.SyncEngine):
            await self._tell_delivery(action.dp_rank, handle)

    def _check_epoch(self, action: actions.EngineAction) -> None:
        obeyed = self._epochs.get(action.dp_rank, -1)
        if action.epoch < obeyed:
            raise StaleLease(f"stale epoch {action.epoch}: {self.id}/{action.dp_rank} has obeyed {obeyed} already")
        self._epochs[action.dp_rank] = action.epoch

    async def _tell_delivery(self, rank: int, handle: Any) -> None:
        """Telemetry: how the weights came."""
        with suppress(ray.exceptions.RayError):  # it is synced, and may be gone now
            found = await handle.delivery.remote()
            if found is not None:
                self._emit(
                    events.WeightsLoaded(
                        pipeline=self.id, dp_rank=rank, version=found.version, transport=found.transport,
                        why=found.why, meant=found.meant, took=round(found.seconds * 1e9),
                    )
                )  # fmt: skip

    async def _kill(self, name: str) -> None:
        handle = self._workers.pop(name, None)
        await self._reap(name)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    async def _start_again(self, rank: int) -> None:
        """Start an engine whose process is gone; wait until it is loaded. One that is there already is left alone."""
        name = engine_name(rank)
        stops = self._stops
        async with self._starting[rank]:
            if name not in self._workers:
                await self._reap(name)
                port = await self._free_port(self._engine_node(rank))
                self._check_goes_on(stops)
                self._make_engine(rank, port)
        handle, desk = self._workers.get(name), self._workers.get(DESK)
        if handle is not None:
            await self._load(name, handle)
        if desk is not None:
            await desk.forget_engine.remote(rank)

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
        """End every worker and drop the weights. Whoever is about to start one starts none."""
        self._stops += 1
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
