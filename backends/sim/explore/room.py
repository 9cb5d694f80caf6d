"""What every bound assumes of a world: a trajectory fits into a turn (docs/guarantees.md, "What is not guaranteed").

Two pipelines that each have a longer one take turns for ever. A lognormal length has no end, so that among many worlds
there is one with a trajectory longer than any multiple of a quantile: what is drawn is looked at, not the distribution.
"""

import msgspec

from backends.sim.crew import lengths
from core.config import Job, Scenario

BESIDE = 4
"""A quarter more for what a turn begins and ends with beside decoding: a gate, messages."""


def has_room(scenario: Scenario) -> bool:
    """Whether everybody's turn lasts as long as its longest trajectory."""
    return all(job.spec.limits.turn >= turn_needed(scenario.seed, job) for job in scenario.jobs)


def with_room(seed: int, job: Job) -> Job:
    """The job with turns that are long enough."""
    limits, least = job.spec.limits, turn_needed(seed, job)
    if limits.turn >= least:
        return job
    spec = msgspec.structs.replace(job.spec, limits=msgspec.structs.replace(limits, turn=least))
    return msgspec.structs.replace(job, spec=spec)


def turn_needed(seed: int, job: Job) -> int:
    """The shortest turn (ns) in which any one trajectory that the job will ever have can be completed."""
    evaluation = job.evaluation
    batches = job.steps + (job.steps // evaluation.every if evaluation is not None else 0)
    size = max(job.target, evaluation.trajectories if evaluation is not None else 0)
    drawn = lengths(seed, job)
    longest = max(drawn.of(batch, trajectory) for batch in range(batches) for trajectory in range(size))
    return longest + longest // BESIDE + job.reward_s
