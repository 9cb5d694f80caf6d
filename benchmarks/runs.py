"""A long run of the incident: `overlap_2gpu` with 200 steps, the whole process.

    python -m benchmarks runs [--quick]
"""

import resource
import subprocess
import sys

import msgspec

from benchmarks.table import Row, at_most, fact
from core.config import Scenario
from scenarios.catalogue import load

STEPS = 200
SECONDS_MAX = 5.0
REPETITIONS = 3


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` once only."""
    best = min(_process(STEPS) for _ in range(1 if quick else REPETITIONS))
    scenario = incident()
    trajectories = STEPS * sum(job.target for job in scenario.jobs)
    return [
        at_most(f"overlap_2gpu, {STEPS} steps, whole process", best, "s", SECONDS_MAX),
        fact("of it, a trajectory", best / trajectories * 1e6, "us"),
    ]


def incident(**changes: int) -> Scenario:
    """The incident's scenario, with other steps or another target for everybody."""
    scenario = load("overlap_2gpu")
    return msgspec.structs.replace(
        scenario, jobs=tuple(msgspec.structs.replace(job, **changes) for job in scenario.jobs)
    )


def _process(steps: int) -> float:
    """Processor seconds of a process that runs the scenario as a user does."""
    command = [sys.executable, "-m", "scenarios.overlap_2gpu", "--steps", str(steps), "--quiet", "--json", "-"]
    before = _of_children()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return _of_children() - before


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
