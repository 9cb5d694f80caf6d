"""A worker: one process (with its ranks) on some GPUs, that does one operation after the other.

Rules of this room:

1. An operation is a SimPy process: whoever asked for it waits for its end, and stops waiting without stopping it. It
   ends with None, or with one line that says why it did not happen.
2. Operations wait their turn in the order they came. Dying is none of them: it takes effect at once, ends all of them,
   and gives the memory back by the long road (`Memory.vacate`).
3. A hung worker never answers, neither to what it was doing nor to what comes, until it dies.
4. A worker refuses older epochs than the last one it obeyed.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy

from backends.sim.link import Steps
from backends.sim.memory import Kind, Parts
from backends.sim.world import World
from core.config import Job
from core.errors import OutOfMemory

Operation = Callable[[], Generator[simpy.Event, Any, str | None]]

_HANG = "hang"


class Worker:
    def __init__(self, world: World, owner: str, gpus: tuple[int, ...], job: Job, phases: Iterable[str]) -> None:
        """`phases`: which of the job's costs it is that pays them."""
        self.world = world
        self.env = world.env
        self.owner = owner
        """Its name in the books of memory."""
        self.gpus = gpus
        self.devices = world.memory.on(gpus)
        self.alive = False
        self.hung = False
        self.slowness = 1.0
        """How many times longer everything takes."""
        self.epoch = -1
        """Of the last order it obeyed."""
        self.why_dead = "it was never started"
        self._queue: list[simpy.Process] = []  # the first has its turn
        self._prices = {name: world.price(getattr(job.costs, name), name, owner) for name in phases}
        self._lags = world.lags_of(owner, job.costs.release)
        self._lag_max = job.spec.limits.release // 2
        self._releases = 0

    # --- operations ----------------------------------------------------------------------------------------

    @property
    def occupied(self) -> bool:
        """Whether a new operation could not start, and end, right now."""
        return self.hung or bool(self._queue)

    def start(self, operation: Operation) -> simpy.Process:
        process = self.env.process(self._in_turn(operation))
        self._queue.append(process)
        return process

    def _in_turn(self, operation: Operation) -> Generator[simpy.Event, Any, str | None]:
        me = self.env.active_process
        assert me is not None
        try:
            while self._queue[0] is not me:
                yield self._queue[0]
            if self.hung:
                yield simpy.Event(self.env)
            return (yield from operation())
        except simpy.Interrupt as cut:
            return (yield from self._cut_off(str(cut.cause)))
        finally:
            self._queue.remove(me)

    def _cut_off(self, cause: str) -> Generator[simpy.Event, Any, str]:
        if cause != _HANG:
            return cause
        try:
            yield simpy.Event(self.env)
        except simpy.Interrupt as end:
            return str(end.cause)
        raise AssertionError("nothing but its death ends the operation of a hung worker")

    def work(self, nanos: int) -> Steps:
        """Let this much work pass."""
        if self.slowness != 1.0:
            nanos = int(nanos * self.slowness)
        if nanos <= 0:
            return
        alarm = self.env.timeout(nanos)
        try:
            yield alarm
        finally:
            self.env.cancel(alarm)

    def cost(self, phase: str) -> int:
        """What doing it once more takes (ns)."""
        return self._prices[phase].next()

    def stale(self, epoch: int) -> str | None:
        """Why an order of this epoch is refused; else it counts as obeyed from now on."""
        if epoch < self.epoch:
            return f"stale epoch {epoch}: {self.owner} has obeyed {self.epoch} already"
        self.epoch = epoch
        return None

    # --- memory --------------------------------------------------------------------------------------------

    def lag(self) -> int:
        """How long the next release takes to become true."""
        self._releases += 1
        return min(self._lags.of(self._releases), self._lag_max)

    def release(self, kinds: tuple[Kind, ...], leak: int, lie: int | None) -> None:
        """Claim that `kinds` are released. `lie`: the ns it really takes, 0 for never; None: the truth."""
        lag = self.lag() if lie is None else lie or None
        self.world.memory.release(self.owner, self.devices, kinds, lag, leak=leak)

    def take(self, parts: Parts, *, quiet: bool = False) -> str | None:
        """Take memory on every GPU, or die of asking: then the reason."""
        try:
            self.world.memory.take(self.owner, self.devices, parts, quiet=quiet)
        except OutOfMemory as error:
            self.fall(str(error))
            return str(error)
        return None

    # --- ends ----------------------------------------------------------------------------------------------

    def hang(self) -> None:
        if self.alive and not self.hung:
            self.hung = True
            self._interrupt(_HANG)

    def die(self, reason: str) -> None:
        """The process tree is killed. Quietly: whoever did it knows."""
        self.why_dead = reason
        self.alive = self.hung = False
        self.slowness = 1.0
        for price in self._prices.values():
            price.renew()
        self._interrupt(f"{self.owner} died: {reason}")
        self.world.memory.vacate(self.owner, self.devices, self.lag())

    def fall(self, reason: str) -> None:
        """It died by itself, and the world hears of it."""
        raise NotImplementedError

    def _interrupt(self, cause: str) -> None:
        for process in self._queue:
            if process is not self.env.active_process and process.is_alive:
                process.interrupt(cause)
