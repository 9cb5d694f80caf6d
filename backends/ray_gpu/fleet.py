"""All workers of the cluster, as the control plane commands them: the half of the backend that carries out actions.

Rules of this room:

1. It holds handles and nothing else: crews are found by name, so that a restarted control plane can take them over.
2. An action ends in one outcome whatever the worker does; a worker that is gone is a failure with that reason.
3. A worker that dies unasked is reported once. Whoever dies by our hand is not reported.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends.ray_gpu import wire
from backends.ray_gpu.clock import RealClock
from backends.ray_gpu.cluster import living_nodes
from backends.ray_gpu.crew import Crew
from backends.ray_gpu.failures import first_line
from backends.ray_gpu.node import NodeAgent
from backends.ray_gpu.places import CONTROL_NAMESPACE, Places, agent_name
from backends.ray_gpu.plan import CrewPlan
from core import actions, events
from core.backend import Outcome
from core.errors import ConfigError, OperationFailed, TurnstileError
from core.model import Cluster

NODES_LOOK_S = 2.0
"""Pause between two looks at which nodes are there."""
OVER = "the control plane is closing"


class Fleet:
    """Also what `core.service` takes for its backend: it has `clock` and `perform`."""

    name = "ray_gpu"

    def __init__(self, places: Places, cluster: Cluster, options: wire.ClusterOptions, clock: RealClock) -> None:
        self.clock = clock
        self._places = places
        self._cluster = cluster
        self._options = options
        self._plans: dict[str, CrewPlan] = {}
        self._crews: dict[str, Crew] = {}
        self._agents: list[Any] = []
        self._node_ids: list[str] = []
        self._addresses: list[str] = []
        self.devices: dict[int, str] = {}
        """What each logical GPU really is."""
        self._uuids: dict[int, str] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._left: dict[int, None] = {}
        """Nodes that are gone; nothing of them can be asked any more."""
        self._emit: Callable[[events.AnyEvent], None] = lambda event: None

    # --- life ------------------------------------------------------------------------------------------

    async def open(self, emit: Callable[[events.AnyEvent], None]) -> None:
        """Start an agent on every node, or find it. Raises ConfigError if Ray has fewer nodes than were declared."""
        self._emit = emit
        alive = living_nodes()
        if len(alive) < self._cluster.nodes:
            raise ConfigError(
                "cluster.nodes", f"{self._cluster.nodes} are declared, the Ray cluster has {len(alive)}",
                "start more with `ray start --address=...`",
            )  # fmt: skip
        self._node_ids = [node["NodeID"] for node in alive[: self._cluster.nodes]]
        self._addresses = [node["NodeManagerAddress"] for node in alive[: self._cluster.nodes]]
        self._agents = [self._agent(number) for number in range(self._cluster.nodes)]
        for ready in await asyncio.gather(*(agent.ready.remote() for agent in self._agents)):
            self.devices |= ready["devices"]
            self._uuids |= ready["uuids"]
        self._start(self._look_at_nodes())

    def _agent(self, node: int) -> Any:
        size = self._cluster.gpus_per_node
        gpus = dict.fromkeys(range(node * size, (node + 1) * size), self._cluster.gpu_memory)
        devices = self._options.devices[node * size : (node + 1) * size]
        return (
            ray.remote(NodeAgent)
            .options(
                name=agent_name(node), namespace=CONTROL_NAMESPACE, get_if_exists=True, lifetime="detached",
                max_restarts=-1, max_task_retries=-1,  # whatever it is asked may be asked again
                num_cpus=0, max_concurrency=1000, scheduling_strategy=self.affinity(node),
            )
            .remote(self._places.session, node, gpus, self._options.device, devices)
        )  # fmt: skip

    def affinity(self, node: int) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self._node_ids[node], soft=False)

    def address(self, node: int) -> str:
        """Where other nodes reach it."""
        return self._addresses[node]

    def agent(self, node: int) -> Any:
        return self._agents[node]

    def uuid(self, gpu: int) -> str:
        """Of the card of a logical GPU; empty on a CPU."""
        return self._uuids.get(gpu, "")

    def physical(self, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """The physical GPUs, on their own node, of logical ones; each once."""
        return tuple(dict.fromkeys(self.cards[gpu] for gpu in gpus))

    @property
    def cards(self) -> tuple[int, ...]:
        """The physical GPU, on its own node, of each logical one."""
        return self._options.devices or tuple(range(self._cluster.gpus_per_node)) * self._cluster.nodes

    async def close(self) -> None:
        """End every worker and agent; remove what they kept."""
        for task in list(self._tasks):
            task.cancel()
        for crew in self._crews.values():
            await crew.stop()
        for agent in self._agents:
            try:
                await agent.close.remote()
            except ray.exceptions.RayError:
                continue  # its node is gone, and everything on it
            finally:
                ray.kill(agent, no_restart=True)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _look_at_nodes(self) -> None:
        """Report a node that left, once."""
        while True:
            await asyncio.sleep(NODES_LOOK_S)
            alive = {node["NodeID"]: None for node in ray.nodes() if node["Alive"]}
            for number, name in enumerate(self._node_ids):
                if name not in alive and number not in self._left:
                    self._left[number] = None
                    for crew in self._crews.values():
                        crew.node_left(number)
                    self._emit(events.NodeLeft(node=number))

    # --- crews -----------------------------------------------------------------------------------------

    def know(self, plan: CrewPlan) -> None:
        """A pipeline whose workers may be asked for; those that already live are taken over."""
        self._plans[plan.id] = plan
        self._crews[plan.id] = Crew(plan, self, self._places, self._cluster, self._emit_of, self._start)
        self._crews[plan.id].adopt()

    def _emit_of(self, event: events.AnyEvent) -> None:
        self._emit(event)

    async def launch(self, pipeline: str, epoch: int) -> None:
        """Start all workers of a pipeline; engines end asleep, the trainer loaded. Raises OperationFailed."""
        try:
            await self._crew(pipeline).launch(epoch)
            await self._report_memory(self._crew(pipeline).nodes)
        except ray.exceptions.RayError as error:
            raise OperationFailed(f"{pipeline} could not start: {first_line(error)}") from error

    def _crew(self, pipeline: str) -> Crew:
        crew = self._crews.get(pipeline)
        if crew is None:
            raise OperationFailed(f"there is no pipeline {pipeline}")
        return crew

    async def inject(self, kind: str, pipeline: str, dp_rank: int) -> str | None:
        """Do harm on purpose; why it could not be done, if so."""
        try:
            await self._crew(pipeline).inject(kind, dp_rank)
        except TurnstileError as error:
            return str(error)
        return None

    # --- actions ---------------------------------------------------------------------------------------

    async def perform(self, action: actions.BACKEND | actions.OpenGate) -> Outcome:
        """Carry out one action of the core."""
        try:
            match action:
                case actions.AwaitMemory():
                    return await self._await_memory(action)
                case actions.StopPipeline():
                    await self._crew(action.pipeline).stop()
                    await self._report_memory(self._crew(action.pipeline).nodes)
                case _:
                    await self._crew(action.pipeline).obey(action)
        except TurnstileError as error:
            return events.ActionFailed(action=action.action, reason=str(error))
        except ray.exceptions.RayError as error:
            return events.ActionFailed(action=action.action, reason=first_line(error))
        return events.ActionDone(action=action.action)

    async def _await_memory(self, action: actions.AwaitMemory) -> Outcome:
        need = dict(zip(action.gpus, action.need, strict=True))
        expect = dict(zip(action.gpus, action.expect or action.need, strict=True))
        by_node: dict[int, list[int]] = {}
        for gpu in action.gpus:
            by_node.setdefault(self._cluster.node_of(gpu), []).append(gpu)
        answers = await asyncio.gather(
            *(
                self._agents[node].await_memory.remote(
                    {gpu: need[gpu] for gpu in gpus}, {gpu: expect[gpu] for gpu in gpus},
                    action.patience / 1e9, action.limit / 1e9,
                )
                for node, gpus in by_node.items()
            )
        )  # fmt: skip
        free = {gpu: seen for _, by_gpu in answers for gpu, seen in by_gpu.items()}
        await self._report_memory(list(by_node), gpus=dict.fromkeys(action.gpus))
        if all(met for met, _ in answers):
            return events.ActionDone(action=action.action, free=free)
        short = ", ".join(f"GPU {gpu} shows {free[gpu]} bytes free, {need[gpu]} needed" for gpu in action.gpus)
        return events.ActionFailed(action=action.action, reason=short, free=free)

    async def _report_memory(self, nodes: list[int], gpus: dict[int, None] | None = None) -> None:
        """Telemetry: what each GPU shows now, and what the weight caches hold of the hosts' memory."""
        nodes = [node for node in nodes if node not in self._left]
        seen = await asyncio.gather(*(self._agents[node].observe.remote() for node in nodes))
        for node, (by_gpu, by_pipeline) in zip(nodes, seen, strict=True):
            self._emit(
                events.MemoryUsed(
                    gpu=-1 - node, used=sum(by_pipeline.values()), capacity=self._cluster.host_memory, by=by_pipeline
                )
            )
            for gpu, by in by_gpu.items():
                if gpus is None or gpu in gpus:
                    self._emit(
                        events.MemoryUsed(gpu=gpu, used=sum(by.values()), capacity=self._cluster.gpu_memory, by=by)
                    )
