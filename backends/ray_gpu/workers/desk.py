"""A pipeline's desk: turns trajectories into prompts, sends them to engines, scores what comes back, and keeps the
samples until they are trained on. Tokens travel from engine to desk to trainer and never through the driver.

1. A trajectory belongs to a group, the samples of one prompt. One that takes the place of a dropped trajectory joins
   the group that lost a member.
2. Of a trajectory that was cut off the desk keeps the tokens, by the segments that the gateway was told; an attempt
   with a prefix goes on from exactly those.
3. A reward that fails is an error of its trajectory.
"""

import asyncio
from hashlib import blake2b
from typing import Any

import msgspec
import ray

from backends.ray_gpu.engines.base import GenerateRequest, GenerateResult
from backends.ray_gpu.places import DESK, engine_name, models, namespace_of
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.tasks.base import Prompt
from backends.ray_gpu.workers.base import AsyncWorker
from core.backend import Attempt, Generation
from core.errors import OperationFailed
from core.workload import settled

Segments = tuple[tuple[int, int], ...]


class _Story:
    """One trajectory: its prompt, and what the newest attempt generated."""

    __slots__ = ("attempt", "group", "logprobs", "prompt", "prompt_ids", "reward", "tokens")

    def __init__(self, group: int, prompt: Prompt, prompt_ids: tuple[int, ...]) -> None:
        self.group = group
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.attempt = -1
        self.tokens: tuple[int, ...] = ()
        self.logprobs: tuple[float, ...] = ()
        self.reward = 0.0

    def begin(self, attempt: int, kept: int) -> None:
        """A newer attempt goes on from the first `kept` tokens; whatever an older one still brings is too late."""
        self.attempt = attempt
        self.tokens, self.logprobs = self.tokens[:kept], self.logprobs[:kept]

    def extend(self, result: GenerateResult) -> None:
        self.tokens += result.token_ids
        self.logprobs += result.logprobs


class Desk(AsyncWorker):
    """An async Ray actor."""

    def __init__(self, plan: CrewPlan, session: str) -> None:
        super().__init__(plan, session, DESK)
        self._workload = settled(plan.job.workload, plan.device)
        self._stories: dict[tuple[int, int], _Story] = {}
        self._vacant: dict[int, list[int]] = {}
        """Groups that lost a member, by batch."""
        self._engines: dict[int, Any] = {}
        self._building = asyncio.Lock()
        self._built = False

    async def build(self) -> None:
        """Load tokenizer, prompts and reward. Once: who asks again waits until it is done. Raises ConfigError."""
        async with self._building:
            if not self._built:
                await asyncio.to_thread(self._open)
                self._built = True

    def _open(self) -> None:
        from backends.ray_gpu.models.resolve import resolve
        from backends.ray_gpu.models.tokenizer import load_tokenizer
        from backends.ray_gpu.workload import Lessons

        self._tokenizer = load_tokenizer(resolve(self._workload.model, models()).path)
        self._lessons = Lessons(self.job, self.plan.seed, self.plan.device, self.plan.caller_path[0])

    # --- rollouts --------------------------------------------------------------------------------------

    async def generate(self, packed: bytes) -> bytes:
        """One attempt at one trajectory; a `Generation`."""
        attempt = msgspec.msgpack.decode(packed, type=Attempt)
        story = self._story(attempt)
        if attempt.attempt > story.attempt:
            story.begin(attempt.attempt, sum(tokens for _, tokens in attempt.prefix))
        version, result = await self._ask(attempt, story)
        segments = attempt.prefix
        if result.status != "failed" and attempt.attempt == story.attempt:
            story.extend(result)
            segments = _with(attempt.prefix, version, len(result.token_ids))
        generation = Generation(status=result.status, segments=segments, reason=result.reason)
        if generation.status == "completed":
            generation = await self._scored(story, generation)
        return msgspec.msgpack.encode(generation)

    async def _scored(self, story: _Story, generation: Generation) -> Generation:
        try:
            story.reward = await self._lessons.reward(story.prompt, self._tokenizer.decode(story.tokens))
        except OperationFailed as error:
            return Generation(status="failed", reason=str(error), answered=True)
        return generation

    async def _ask(self, attempt: Attempt, story: _Story) -> tuple[int, GenerateResult]:
        request = GenerateRequest(
            id=request_id(attempt), input_ids=story.prompt_ids + story.tokens,
            max_new_tokens=self._workload.max_tokens - len(story.tokens), temperature=self._workload.temperature,
            top_p=self._workload.top_p, seed=self._draw(attempt, len(story.tokens)),
            stop_ids=self._tokenizer.stop_ids,
        )  # fmt: skip
        try:
            answer = await self._engine(attempt.dp_rank).generate.remote(msgspec.msgpack.encode(request))
        except (ray.exceptions.RayError, ValueError) as error:
            self._engines.pop(attempt.dp_rank, None)
            gone = f"{self.plan.id}/{attempt.dp_rank} is gone ({type(error).__name__})"
            return -1, GenerateResult(status="failed", reason=gone)
        return msgspec.msgpack.decode(answer, type=tuple[int, GenerateResult])

    def _draw(self, attempt: Attempt, position: int) -> int:
        """Seed of the sampling of a trajectory from a position on; below 2**31, which every engine takes."""
        number = self.plan.behind.batches + attempt.batch
        name = f"{self.plan.seed}/{self.plan.id}/{number}/{attempt.trajectory}/{position}".encode()
        return int.from_bytes(blake2b(name, digest_size=4).digest()) >> 1

    async def cancel(self, packed: bytes) -> None:
        """Nobody waits for this attempt any more: its engine is to stop."""
        attempt = msgspec.msgpack.decode(packed, type=Attempt)
        if attempt.dp_rank in self._engines:
            self._engines[attempt.dp_rank].cancel.remote(request_id(attempt))

    async def forget_engine(self, rank: int) -> None:
        """It was started again, as another process under the same name."""
        self._engines.pop(rank, None)

    def _engine(self, rank: int) -> Any:
        if rank not in self._engines:
            self._engines[rank] = ray.get_actor(engine_name(rank), namespace_of(self.plan.id))
        return self._engines[rank]

    def _story(self, attempt: Attempt) -> _Story:
        key = attempt.batch, attempt.trajectory
        story = self._stories.get(key)
        if story is None:
            group = self._group(attempt)
            first = group * (1 if attempt.evaluation else self.job.samples_per_prompt)
            number = self.plan.behind.batches + attempt.batch
            prompt = self._lessons.prompt(number, first, evaluation=attempt.evaluation)
            story = self._stories[key] = _Story(group, prompt, self._tokenizer.encode(prompt))
        return story

    def _group(self, attempt: Attempt) -> int:
        size = 1 if attempt.evaluation else self.job.samples_per_prompt
        if attempt.trajectory < self.job.target or attempt.evaluation:
            return attempt.trajectory // size
        vacant = self._vacant.get(attempt.batch)
        return vacant.pop(0) if vacant else attempt.trajectory // size

    async def dropped(self, batch: int, trajectory: int) -> None:
        """The trajectory ended without being trained; its group has room for another."""
        story = self._stories.pop((batch, trajectory), None)
        if story is not None:
            self._vacant.setdefault(batch, []).append(story.group)

    # --- training --------------------------------------------------------------------------------------

    async def rows(self, batch: int, trajectories: tuple[int, ...]) -> tuple[list[Any], dict[str, float]]:
        """What the trainer trains on, with advantages; and what is known of the batch (mean reward, tokens)."""
        from backends.ray_gpu.training.grpo import group_advantages
        from backends.ray_gpu.training.records import Row

        stories = [self._stories[batch, trajectory] for trajectory in trajectories]
        advantages = group_advantages([story.reward for story in stories], [story.group for story in stories])
        rows = [
            Row(
                tokens=story.prompt_ids + story.tokens, prompt_tokens=len(story.prompt_ids), logprobs=story.logprobs,
                advantage=advantage,
            )
            for story, advantage in zip(stories, advantages, strict=True)
        ]  # fmt: skip
        return rows, _figures(stories)

    async def closed(self, batch: int) -> dict[str, float]:
        """The batch is over: forget its trajectories. Returns what is known of those that were scored."""
        keys = [key for key in self._stories if key[0] == batch]
        stories = [self._stories.pop(key) for key in keys]
        self._vacant.pop(batch, None)
        return _figures(stories)


def request_id(attempt: Attempt) -> str:
    return f"{attempt.batch}/{attempt.trajectory}/{attempt.attempt}"


def _figures(stories: list[_Story]) -> dict[str, float]:
    if not stories:
        return {}
    tokens = sum(len(story.tokens) for story in stories)
    return {
        "reward": sum(story.reward for story in stories) / len(stories),
        "tokens": float(tokens),
        "length": tokens / len(stories),
    }


def _with(segments: Segments, version: int, tokens: int) -> Segments:
    """Append tokens of a version; one segment a stretch of one version."""
    if not tokens and segments:
        return segments
    if segments and segments[-1][0] == version:
        return (*segments[:-1], (version, segments[-1][1] + tokens))
    return (*segments, (version, tokens))
