"""What every worker process has: a name, a record of its processes, and a call that lasts as long as it lives."""

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
        self.record()

    def record(self, *children: int) -> None:
        """Write down which processes this worker consists of."""
        Processes(self.places.processes).record(self.owner, (os.getpid(), *children), self.gpus)

    def live(self) -> None:
        """Never returns: whoever waits for it hears of this process's death."""
        threading.Event().wait()

    def obeys(self, epoch: int) -> None:
        """Take an order of this epoch; raises StaleLease if a later one was obeyed already."""
        if epoch < self._epoch:
            raise StaleLease(f"stale epoch {epoch}: {self.owner} has obeyed {self._epoch} already")
        self._epoch = epoch
