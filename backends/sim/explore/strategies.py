"""The order of what is ready at one instant: a portfolio over `backends.sim.policies`.

No policy wins everywhere (measured: a walk is blind to starvation, PCT poor at broad races), so `all` gives each
seed the order that users see and one drawn from the others. A schedule that failed is written down as holds, which
replay without any generator and shrink towards none: FIFO.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from backends.sim.explore.case import Schedule, Strategy
from backends.sim.explore.chance import Chance
from backends.sim.policies import Choice, Fifo, Holds, Policy, Walk

LENGTHS = (50, 150, 500, 1_500)
"""Decisions a run may have; PCT draws which of them its demotions are spread over."""


class Pct:
    """Random priorities; at `depth` - 1 drawn decisions the task that would run falls below all others.

    As holds: whoever stands before the best task waits until the rest of the instant is idle. A task's priority is
    drawn when it is first seen, by its birth number, so that it does not depend on who was seen before.
    """

    def __init__(self, seed: int, depth: int, length: int) -> None:
        self._seed = seed
        draw = random.Random(f"{seed}:sched:pct").random
        self._demotions = {int(draw() * length): -i for i in range(1, depth)}
        self._priority: dict[int, float] = {}

    def holds(self, choice: Choice) -> int:
        births = choice.births[: choice.most + 1]
        best = max(range(len(births)), key=lambda place: self._of(births[place]))
        if choice.index in self._demotions:
            self._priority[births[best]] = self._demotions[choice.index]
            best = max(range(len(births)), key=lambda place: self._of(births[place]))
        return best

    def _of(self, birth: int) -> float:
        found = self._priority.get(birth)
        if found is None:
            found = self._priority[birth] = random.Random(f"{self._seed}:sched:{birth}").random()
        return found


class Recorder:
    """Asks another policy, and remembers what it answered where that was not FIFO."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.decisions: list[int] = []
        """The most that could have been held, for each decision."""
        self.made: dict[int, int] = {}

    def holds(self, choice: Choice) -> int:
        holds = min(max(self._policy.holds(choice), 0), choice.most)
        self.decisions.append(choice.most)
        if holds:
            self.made[choice.index] = holds
        return holds


def policy_of(schedule: Schedule) -> Policy:
    match schedule.strategy:
        case Strategy.WALK:
            return Walk(schedule.seed)
        case Strategy.HOLDS:
            return Walk(schedule.seed, schedule.p)
        case Strategy.PCT:
            return Pct(schedule.seed, schedule.depth, schedule.length)
        case Strategy.EXHAUSTIVE:
            return Holds(schedule.holds)
    return Holds(schedule.holds) if schedule.holds else Fifo()


def draw(seed: int, strategy: Strategy) -> Schedule:
    """The schedule of a seed under one strategy."""
    chance = Chance(seed, "sched")
    return Schedule(
        strategy=strategy,
        seed=seed,
        p=chance.pick((1 / 4, 1 / 16)) if strategy is Strategy.HOLDS else 0.0,
        depth=chance.between(2, 4) if strategy is Strategy.PCT else 0,
        length=chance.pick(LENGTHS) if strategy is Strategy.PCT else 0,
    )


def portfolio(seed: int, strategy: Strategy | None) -> tuple[Schedule, ...]:
    """The schedules one seed's world is run under; None: FIFO first, then one drawn from the random ones."""
    if strategy is None:
        drawn = Chance(seed, "strategy").pick((Strategy.WALK, Strategy.PCT, Strategy.HOLDS))
        return Schedule(), draw(seed, drawn)
    return (draw(seed, strategy) if strategy is not Strategy.FIFO else Schedule(),)


def written_down(holds: Mapping[int, int]) -> Schedule:
    """The same order without the policy that found it."""
    return Schedule(holds=dict(holds))


# --- exhaustive -------------------------------------------------------------------------------------------


class Ran(Protocol):
    """What the search needs to know of a run."""

    @property
    def decisions(self) -> list[int]: ...


class FewHolds:
    """Every schedule that holds at most `budget` steps, fewest first; iterating runs each and yields what came of it.

    A hold changes only what comes after it, so the schedules with one hold more than a given one are: the same, and
    a hold at some later decision of *its* run. Where those are more than `most_runs` allows, they are taken evenly
    spread, and `complete` is False.
    """

    def __init__(self, run: Callable[[Schedule], Ran], budget: int, most_runs: int) -> None:
        self.complete = True
        self._run = run
        self._budget = budget
        self._left = most_runs

    def __iter__(self) -> Iterator[Ran]:
        done = self._run(Schedule(strategy=Strategy.EXHAUSTIVE))
        yield done
        self._left -= 1
        level: list[tuple[dict[int, int], Ran]] = [({}, done)]
        for _ in range(self._budget):
            scripts = self._as_many_as_allowed([more for holds, done in level for more in _one_more(holds, done)])
            level = []
            for script in scripts:
                done = self._run(Schedule(strategy=Strategy.EXHAUSTIVE, holds=script))
                yield done
                level.append((script, done))

    def _as_many_as_allowed(self, scripts: list[dict[int, int]]) -> list[dict[int, int]]:
        if len(scripts) > self._left:
            self.complete = False
            scripts = [scripts[i * len(scripts) // self._left] for i in range(self._left)]
        self._left -= len(scripts)
        return scripts


def _one_more(holds: dict[int, int], done: Ran) -> Iterator[dict[int, int]]:
    """The schedules with one held step more, each reached from one side only."""
    last = max(holds, default=-1)
    if last >= 0 and holds[last] < done.decisions[last]:
        yield {**holds, last: holds[last] + 1}
    for index in range(last + 1, len(done.decisions)):
        yield {**holds, index: 1}
