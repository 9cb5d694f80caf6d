"""A crew: all workers of one pipeline and its weight cache, from initialisation to the stop.

Rules of this room:

1. Initialisation is an operation of the actor's trainer: what kills or hangs that, kills or hangs initialisation.
2. It holds `memory.init_peak` on every GPU of the pipeline while it runs. After it the actor is onloaded (it publishes
   version 0 from there, and is offloaded like after a step); all other processes are asleep, with their residue. The
   rest comes back after the usual lag.
3. A stop takes effect at once, whatever is going on, and is final until the next initialisation.
"""

from collections.abc import Generator
from typing import Any

import simpy

from backends.sim.chance import Draws, Stream
from backends.sim.engine import Engine, Kernels
from backends.sim.link import WeightCache
from backends.sim.memory import Kind, Parts
from backends.sim.trainer import Trainer
from backends.sim.worker import Worker
from backends.sim.world import World
from core.backend import Attempt, Phase
from core.config import Job
from core.errors import OutOfMemory
from core.model import Role

Outcome = str | None


def lengths(seed: int, job: Job) -> Draws:
    """How long its trajectories decode (ns), by batch and trajectory, whichever attempt it is."""
    return Draws(job.costs.trajectory, Stream(seed, "trajectory", job.spec.id), job.target)


class Crew:
    def __init__(self, world: World, job: Job) -> None:
        spec = job.spec
        self.world = world
        self.job = job
        self.started = False
        self.cache = WeightCache(world.memory, spec.id, world.hosts_of(spec.union), spec.memory.host_cache)
        kernels = Kernels()
        self.engines = tuple(Engine(world, job, rank, self.cache, kernels) for rank in range(spec.infer.size))
        groups = [group for group in spec.groups if group.gpus and group.role is not Role.ACTOR_INFER]
        self.trainers = {group.role: Trainer(world, job, group, self.cache) for group in groups}
        self._init_owner = f"{spec.id}/init"
        self._devices = world.memory.on(spec.union)
        self._commands = world.price(job.costs.command, "command", spec.id)
        self._lengths = lengths(world.seed, job)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (*self.trainers.values(), *self.engines)

    @property
    def actor(self) -> Trainer:
        return self.trainers[Role.ACTOR_TRAIN]

    def engine(self, dp_rank: int) -> Engine | None:
        return self.engines[dp_rank] if 0 <= dp_rank < len(self.engines) else None

    def length(self, attempt: Attempt) -> int:
        """ns of decoding that this trajectory takes in all, whichever attempt it is."""
        return max(1, self._lengths.of(attempt.batch, attempt.trajectory))

    def command_delay(self) -> int:
        """ns until the pipeline has taken its next command."""
        return self._commands.next()

    def phase(self, role: Role, name: Phase, epoch: int, version: int) -> simpy.Process | str:
        """The phase as an operation to wait for, or why it cannot be."""
        if name == "init":
            return self.actor.start(lambda: self._initialise(epoch))
        trainer = self.trainers.get(role)
        if trainer is None:
            return f"{self.job.spec.id} has no worker group {role.value} with GPUs"
        return trainer.start(lambda: trainer.phase(name, epoch, version))

    def stop(self, reason: str) -> None:
        """Kill every process and drop the weights."""
        self.started = False
        for worker in self.workers:
            worker.die(reason)
        self.cache.clear()

    # --- initialisation ------------------------------------------------------------------------------------

    def _initialise(self, epoch: int) -> Generator[simpy.Event, Any, Outcome]:
        actor = self.actor
        refused = actor.stale(epoch)
        if refused:
            return refused
        if self.started and all(worker.alive for worker in self.workers):
            return None
        actor.alive = True  # its process is up, and can be killed
        memory = self.world.memory
        peak = self.job.spec.memory.init_peak
        try:
            memory.take(self._init_owner, self._devices, ((Kind.INIT, peak),))
            yield from actor.work(actor.cost("init"))
            self._settle()
        except OutOfMemory as error:
            actor.fall(str(error))
            return str(error)
        finally:
            memory.vacate(self._init_owner, self._devices, actor.lag())
        return None

    def _settle(self) -> None:
        """Hand every process what it does not hold yet, out of what initialisation took."""
        residue = (Kind.RESIDUE, self.job.spec.memory.residue)
        for worker in self.workers:
            self._endow(worker, (residue, *self.actor.parts) if worker is self.actor else (residue,))
            worker.alive = True
        self.actor.onloaded = True
        self.started = True

    def _endow(self, worker: Worker, parts: Parts) -> None:
        for device in worker.devices:
            for kind, size in parts:
                missing = size - device.holds(worker.owner, kind)
                if missing > 0:
                    self.world.memory.pass_on(device, self._init_owner, Kind.INIT, worker.owner, kind, missing)
