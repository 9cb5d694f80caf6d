"""A trainer: the worker group of a role that is not rollout (actor_train, critic, reference), through its phases.

Rules of this room:

1. A phase takes its declared time and holds its declared memory: offloaded, the residue; onloaded, all of
   `memory.train`. Phases that compute need the group onloaded; doubled onloads and offloads change nothing.
2. Publishing copies the weights into the cache of every node of the pipeline, over the links of those nodes. They can
   be published offloaded: a copy is on the host then.
3. Whatever fails says so in one line; out of memory, on a GPU or on the host, kills the process that asked.
"""

from collections.abc import Generator
from typing import Any

import simpy

from backends.sim.link import WeightCache, transfer
from backends.sim.memory import Kind, Parts
from backends.sim.worker import Worker
from backends.sim.world import World
from core.backend import Phase
from core.config import Job
from core.errors import OutOfMemory
from core.events import TrainerFailed
from core.model import Role, WorkerGroup

PHASES = ("init", "onload", "train", "critic_train", "log_probs", "publish", "offload")
ONLOADED = (Kind.WEIGHTS, Kind.OPTIMIZER)

Outcome = str | None


class Trainer(Worker):
    def __init__(self, world: World, job: Job, group: WorkerGroup, cache: WeightCache) -> None:
        super().__init__(world, f"{job.spec.id}/{group.role.value}", group.gpus, job, PHASES)
        self.pipeline = job.spec.id
        self.role = group.role
        self.cache = cache
        self.cache_links = world.links_of(job.spec.union)
        self.parts = _parts(job, group.tp)
        self.residue = job.spec.memory.residue
        self.onloaded = False

    def phase(self, name: Phase, epoch: int, version: int) -> Generator[simpy.Event, Any, Outcome]:
        """Any phase but `init`, which concerns the whole crew."""
        refused = self.stale(epoch)
        if refused:
            return refused
        if not self.alive:
            return f"{self.owner} has no process: {self.why_dead}"
        if name == "onload":
            return (yield from self._onload())
        if name == "offload":
            return (yield from self._offload())
        if name == "publish":
            return (yield from self._publish(version))
        return (yield from self._compute(name))

    def _onload(self) -> Generator[simpy.Event, Any, Outcome]:
        if self.onloaded:
            return None
        failed = self.take(self.parts)
        if failed:
            return failed
        yield from self.work(self.cost("onload"))
        self.onloaded = True
        return None

    def _compute(self, name: Phase) -> Generator[simpy.Event, Any, Outcome]:
        if not self.onloaded:
            return f"{self.owner} is offloaded and cannot run {name}"
        yield from self.work(self.cost(self._cost_of(name)))
        return None

    def _cost_of(self, name: Phase) -> str:
        if name != "train":
            return "log_probs"
        return "critic_train" if self.role is Role.CRITIC else "train"

    def _publish(self, version: int) -> Generator[simpy.Event, Any, Outcome]:
        try:
            self.cache.begin()
        except OutOfMemory as error:
            self.fall(str(error))
            return str(error)
        done = False
        try:
            yield from transfer(self.cache_links, self.cache.size, self.cost("publish"), self.work)
            done = True
        finally:
            if not done:
                self.cache.give_up()
        self.cache.complete(version)
        return None

    def _offload(self) -> Generator[simpy.Event, Any, Outcome]:
        if not self.onloaded:
            return None
        yield from self.work(self.cost("offload"))
        self.onloaded = False
        armed = self.world.armed
        leak = armed.take("leak_residue", self.pipeline)
        lie = armed.take("false_release", self.pipeline)
        self.release(ONLOADED, leak.bytes if leak else 0, lie.duration if lie else None)
        return None

    def die(self, reason: str) -> None:
        self.onloaded = False
        super().die(reason)

    def fall(self, reason: str) -> None:
        if self.alive:
            self.die(reason)
            self.world.tell(TrainerFailed(pipeline=self.pipeline, reason=reason))


def _parts(job: Job, tp: int) -> Parts:
    """An onloaded trainer on one GPU, beyond its residue: its share of the weights; the rest is optimizer and work."""
    memory = job.spec.memory
    total = max(0, memory.train - memory.residue)
    weights = min(memory.host_cache // tp, total)
    return (Kind.WEIGHTS, weights), (Kind.OPTIMIZER, total - weights)
