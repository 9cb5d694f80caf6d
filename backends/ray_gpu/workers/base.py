"""What every worker process has: a name, a record of its processes, and a call that lasts as long as it lives.

That call takes one of the actor's threads (or places), and its caller, a control plane, may die and be followed by
another: the next call ends the one before, or after a few such deaths no thread would be left for anything else.
"""

import asyncio
import os
import threading

from backends.ray_gpu.places import Places, owner
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.processes import Processes
from core.errors import StaleLease


class Worker:
    def __init__(self, plan: CrewPlan, session: str, name: str, gpus: tuple[int, ...] = ()) -> None:
        self.plan = plan
        self.job = plan.job
        self.name = name
        self.places = Places(session)
        self.owner = owner(plan.id, name)
        self.gpus = gpus
        self._epoch = -1
        self._watching = threading.Lock()
        self._watched = threading.Event()
        """Set when somebody else watches."""
        self.record()

    def record(self, *children: int) -> None:
        """Write down which processes this worker consists of."""
        Processes(self.places.processes).record(self.owner, (os.getpid(), *children), self.gpus)

    def live(self) -> None:
        """Lasts as long as this process, or until somebody else calls it: whoever waits hears of its death."""
        with self._watching:
            before, self._watched = self._watched, threading.Event()
            mine = self._watched
        before.set()
        mine.wait()

    def obeys(self, epoch: int) -> None:
        """Take an order of this epoch; raises StaleLease if a later one was obeyed already."""
        if epoch < self._epoch:
            raise StaleLease(f"stale epoch {epoch}: {self.owner} has obeyed {self._epoch} already")
        self._epoch = epoch


class AsyncWorker(Worker):
    """A worker that is an async Ray actor."""

    def __init__(self, plan: CrewPlan, session: str, name: str, gpus: tuple[int, ...] = ()) -> None:
        super().__init__(plan, session, name, gpus)
        self._seen = asyncio.Event()

    async def live(self) -> None:  # type: ignore[override]
        self._seen.set()
        self._seen = mine = asyncio.Event()
        await mine.wait()
