"""An open rollout batch as its pipeline sees it: what waits, what was accepted, what was given up.

Plain bookkeeping, no tasks, no engines (see `core.gateway`). A trajectory is known by its index; a sample that is
dropped again is replaced under a *new* index, so that every trajectory ends exactly once (S5).
"""

from collections import deque

import anyio
import msgspec

from core.model import BatchKind

NONE = -1
"""Attempt of a trajectory that has none in flight; rank of no engine."""


class Sample(msgspec.Struct, frozen=True):
    """An accepted trajectory."""

    batch: int
    trajectory: int
    attempt: int
    dp_rank: int
    segments: tuple[tuple[int, int], ...]
    """(weight version, tokens), oldest first."""

    @property
    def version(self) -> int:
        """The oldest weight version in it: what its staleness is counted from."""
        return self.segments[0][0]


class Trajectory:
    """One trajectory of a batch and the story of its attempts so far."""

    __slots__ = ("attempt", "attempts", "avoid", "batch", "failures", "index", "prefix")

    def __init__(self, batch: "RolloutBatch", index: int) -> None:
        self.batch = batch
        self.index = index
        self.attempts = 0
        self.attempt = NONE
        """The attempt that counts; none while it waits and once it is over."""
        self.failures = 0
        self.avoid = NONE
        """Rank of the engine that failed it last."""
        self.prefix: tuple[tuple[int, int], ...] = ()


class RolloutBatch:
    """An open batch as its gateway sees it: what waits, what was accepted, what was given up."""

    def __init__(self, number: int, target: int, kind: BatchKind) -> None:
        self.number = number
        self.target = target
        self.kind = kind
        self.version: int | None = None
        """Evaluation: the one version it runs on, fixed when its first trajectory starts."""
        self.samples: list[Sample] = []
        self.failure: str | None = None
        """Why not a single trajectory could be had."""
        self._trajectories = [Trajectory(self, index) for index in range(target)]
        self._fresh = deque(self._trajectories)
        self._again: deque[Trajectory] = deque()
        self._settled = anyio.Event()
        self._settle()

    @property
    def demand(self) -> int:
        return self.target - len(self.samples)

    @property
    def waiting(self) -> Trajectory | None:
        """The next trajectory to start; those cut off or failed go before fresh ones."""
        if self._again:
            return self._again[0]
        return self._fresh[0] if self._fresh else None

    async def filled(self) -> None:
        """Wait until nothing is missing (any more): accepted, or given up."""
        while self.demand:
            await self._settled.wait()

    def start(self) -> Trajectory:
        trajectory = (self._again or self._fresh).popleft()
        trajectory.attempt = trajectory.attempts
        trajectory.attempts += 1
        return trajectory

    def queue_again(self, trajectory: Trajectory) -> None:
        trajectory.attempt = NONE
        self._again.append(trajectory)

    def accept(self, trajectory: Trajectory, sample: Sample) -> None:
        trajectory.attempt = NONE
        self.samples.append(sample)
        self._settle()

    def give_up(self, trajectory: Trajectory, reason: str) -> None:
        trajectory.attempt = NONE
        self.target -= 1
        if not self.target:
            self.failure = reason
        self._settle()

    def replace(self, gone: list[Sample]) -> None:
        """Ask for as many new trajectories as accepted ones are dropped; new indices, for each ends only once."""
        dropped = {sample.trajectory for sample in gone}
        self.samples = [sample for sample in self.samples if sample.trajectory not in dropped]
        first = len(self._trajectories)
        new = [Trajectory(self, first + i) for i in range(len(gone))]
        self._trajectories += new
        self._fresh += new
        if self._settled.is_set():
            self._settled = anyio.Event()

    def recall(self) -> None:
        """Void every attempt in flight: their trajectories wait again."""
        for trajectory in self._trajectories:
            if trajectory.attempt != NONE:
                self.queue_again(trajectory)

    def close(self) -> list[Sample]:
        """The end of the batch: what was accepted. Its trajectories and the batch let go of each other, for only a
        garbage collector could tell that nobody needs them any more, and the simulator runs without one."""
        self.recall()
        for trajectories in (self._trajectories, self._fresh, self._again):
            trajectories.clear()
        return self.samples

    def _settle(self) -> None:
        if not self.demand:
            self._settled.set()
