"""How many small worlds a second: what the explorer lives on.

    python -m benchmarks worlds [--quick]

The reference world is the incident's: 2 pipelines on 2 GPUs, but 2 steps of 4 trajectories, all oracles on. Explored,
it runs under a random walk with the judge on top; the same seeds are run plainly next to it. The scenario file is read
once, as the explorer reads it.
"""

from collections.abc import Callable
from functools import cache, partial

import msgspec

from backends.sim.explore.case import Case, Strategy
from backends.sim.explore.judge import judge
from backends.sim.explore.strategies import draw
from benchmarks.runs import incident
from benchmarks.table import Row, at_least, at_most, best_of, fact
from core.config import Scenario
from core.run import execute

WORLDS_A_SECOND = 150
EXPLORER_RATIO = 3.0
SEEDS = 3


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` repeats less."""
    plain, explored = _means(8 if quick else 60)
    return [
        fact("reference world, plain", 1 / plain, "worlds/s"),
        at_least("reference world, explored", 1 / explored, "worlds/s", WORLDS_A_SECOND),
        at_most("explored beside plain", explored / plain, "x", EXPLORER_RATIO),
    ]


def reference(seed: int) -> Scenario:
    return msgspec.structs.replace(_world(), seed=seed)


@cache
def _world() -> Scenario:
    return incident(steps=2, target=4)


def _means(repetitions: int) -> list[float]:
    """Seconds a world, plain and explored: over some seeds, each at its best, the two by turns."""
    ways: tuple[Callable[[int], None], ...] = (_plainly, _explored)
    best = [[float("inf")] * SEEDS for _ in ways]
    for _ in range(repetitions):
        for seed in range(SEEDS):
            for one, times in zip(ways, best, strict=True):
                times[seed] = min(times[seed], best_of(1, partial(one, seed)))
    return [sum(times) / SEEDS for times in best]


def _plainly(seed: int) -> None:
    result = execute(reference(seed), "sim")
    assert result.outcome == "completed" and not result.violations, f"seed {seed}: {result.outcome}"


def _explored(seed: int) -> None:
    made = judge(Case(scenario=reference(seed), schedule=draw(seed, Strategy.WALK)))
    assert made.finding is None, f"seed {seed}: {made.finding}"
