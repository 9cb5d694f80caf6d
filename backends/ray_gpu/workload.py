"""What one pipeline is asked, and how its answers are judged: a `Workload` turned into prompts and rewards.

1. A prompt depends on the run's seed, the pipeline, the batch's number and the trajectory's alone, so that a fault of
   one pipeline, a restart or another order changes nobody's prompts.
2. All of a batch's trajectories share its prompts by turns of `samples_per_prompt`; one that replaces a dropped one has
   an index past the target, and starts over from the first prompt.
3. No torch, no transformers: a driver checks a workload before it starts anything.
"""

from pathlib import Path

from backends.ray_gpu.prompts import PromptFile
from backends.ray_gpu.rewards import RewardFunction, load_reward
from backends.ray_gpu.tasks import make_task
from backends.ray_gpu.tasks.base import Prompt, Task
from core.config import Job
from core.errors import ConfigError
from core.workload import settled


class Lessons:
    """The prompts and rewards of one pipeline."""

    def __init__(self, job: Job, seed: int, device: str, folder: str | Path = ".") -> None:
        """`seed`: the run's. `folder`: where the user's reward module may lie, beside wherever Python looks.

        Reads the prompts and imports the reward. Raises ConfigError if either is wrong.
        """
        self.workload = settled(job.workload, device)
        self._target = job.target
        self._samples = job.samples_per_prompt
        self._prompts = -(-job.target // job.samples_per_prompt)
        self._seed = f"{seed}/{job.spec.id}"
        try:
            self._source, self._reward = self._open(folder)
        except ConfigError as bad:
            where = f"{job.spec.id}: {bad.where}" if bad.where else job.spec.id
            raise ConfigError(where, bad.problem, bad.remedy) from bad

    def group(self, trajectory: int) -> int:
        """Which of the batch's prompts a trajectory answers: rewards are compared among those of one group."""
        return trajectory % self._target // self._samples

    def prompt(self, batch: int, trajectory: int, *, evaluation: bool = False) -> Prompt:
        """What a trajectory is asked. Evaluation has prompts of its own, in an order of their own."""
        if evaluation:
            return self._source.prompt(f"{self._seed}/evaluation", trajectory)
        return self._source.prompt(self._seed, batch * self._prompts + self.group(trajectory))

    async def reward(self, prompt: Prompt, completion: str) -> float:
        """How good a completion is. Raises OperationFailed if the user's function fails or takes too long."""
        if self._reward is not None:
            return await self._reward(prompt.as_dict(), completion)
        assert not isinstance(self._source, PromptFile), "prompts from a file come with a reward"
        return self._source.reward(prompt, completion)

    def _open(self, folder: str | Path) -> tuple[PromptFile | Task, RewardFunction | None]:
        workload = self.workload
        source: PromptFile | Task
        if workload.prompts:
            source = PromptFile(workload.prompts)
        else:
            assert workload.size is not None, "a task's size is settled"
            source = make_task(workload.task, workload.size)
        reward = load_reward(workload.reward, workload.reward_limit, folder) if workload.reward else None
        return source, reward
