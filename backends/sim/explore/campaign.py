"""Many seeds on many cores. What is found does not depend on how many.

1. A seed is worked on by one process, from data drawn from it alone; results are taken in the order of seeds.
2. Seeds travel in portions; after a few portions a worker process is replaced, so that nothing a run left behind can
   slow down, or change, the ten-thousandth one after it.
3. Of each signature the first failing seed is shrunk, by the process that counts, in the order of seeds.
"""

import gc
import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool
from typing import NamedTuple

import msgspec

from backends.sim.explore import guests, strategies, swarm, worlds
from backends.sim.explore.artefact import Replay
from backends.sim.explore.case import Case, Finding, Schedule, Strategy
from backends.sim.explore.chance import Chance
from backends.sim.explore.judge import Judgement, judge
from core.closeness import Wait
from core.config import Scenario
from core.trace import header_of, replay

PORTION = 5
PORTIONS_EACH = 40
"""Portions that a worker process does before it is replaced."""
TWICE = 0.05
"""Share of the runs that are run again, compared bit for bit, and fed through `decide` once more."""
EXHAUSTIVE_SHARE = 0.02
"""Of `all`: how often the world is a small one, searched exhaustively."""
HOLDS_BUDGET = 1
SCHEDULES_MOST = 200


class Plan(NamedTuple):
    """What a campaign is about."""

    strategy: Strategy | None = None
    """None: the portfolio."""
    classes: tuple[str, ...] = ()
    """Of faults."""
    scenario: Scenario | None = None
    """A given world; None: a random one for each seed."""


class Failure(NamedTuple):
    seed: int
    case: Case
    finding: Finding


class Close(NamedTuple):
    """A wait and the seed it came from."""

    wait: Wait
    seed: int


class Result:
    """What came of one seed, or of several added up."""

    def __init__(self) -> None:
        self.seeds = 0
        self.runs = 0
        self.entries = 0
        self.decisions = 0
        self.twice = 0
        self.searched: Counter[str] = Counter()
        """Exhaustive searches: `complete` or `capped`."""
        self.runs_of: Counter[str] = Counter()
        """Runs by strategy."""
        self.struck: Counter[str] = Counter()
        """Faults by kind."""
        self.outcomes: Counter[str] = Counter()
        self.closest: dict[str, Close] = {}
        """By rule, of all runs the wait that came closest to its bound; of several the first one."""
        self.bands: Counter[tuple[str, str]] = Counter()
        """Runs by rule and by how close their closest wait came (`core.closeness.BANDS`)."""
        self.found: Counter[str] = Counter()
        """Failures by signature."""
        self.failures: list[Failure] = []

    def add(self, other: "Result") -> None:
        for name in ("seeds", "runs", "entries", "decisions", "twice"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("searched", "runs_of", "struck", "outcomes", "bands", "found"):
            getattr(self, name).update(getattr(other, name))
        for close in other.closest.values():
            self._came(close)

    def take(self, seed: int, case: Case, run: Judgement) -> None:
        self.runs += 1
        self.entries += run.entries
        self.decisions += len(run.decisions)
        self.runs_of[str(case.schedule.strategy)] += 1
        self.struck.update(run.struck)
        self.outcomes[run.outcome] += 1
        for wait in run.closest:
            self.bands[wait.rule, wait.band] += 1
            self._came(Close(wait, seed))
        if run.finding is not None:
            self.fail(seed, case, run.finding)

    def _came(self, close: Close) -> None:
        known = self.closest.get(close.wait.rule)
        if known is None or close.wait.closer(known.wait):
            self.closest[close.wait.rule] = close

    def fail(self, seed: int, case: Case, finding: Finding) -> None:
        """Count it; of a signature that the same seed showed already, nothing more."""
        if all(failure.finding.signature != finding.signature for failure in self.failures):
            self.found[finding.signature] += 1
            self.failures.append(Failure(seed, case, finding))


# --- one seed ---------------------------------------------------------------------------------------------


def draw(plan: Plan, seed: int, *, small: bool = False) -> Case:
    """The world of a seed, with its faults and guests; the schedule is FIFO."""
    if plan.scenario is None:
        case = worlds.draw(seed, small=small)
    else:
        case = Case(scenario=msgspec.structs.replace(plan.scenario, seed=seed))
    case = swarm.afflict(case, seed, plan.classes)
    if "strange_client" in plan.classes and Chance(seed, "guests?").often(0.3):
        case = guests.draw(case, seed)
    return case


def explore(plan: Plan, seed: int) -> Result:
    """Everything that is done for one seed."""
    result = Result()
    result.seeds = 1
    exhaustive = plan.strategy is Strategy.EXHAUSTIVE
    if plan.strategy is None and plan.scenario is None:
        exhaustive = Chance(seed, "exhaustive?").often(EXHAUSTIVE_SHARE)
    if exhaustive:
        _search(draw(plan, seed, small=True), seed, result)
        return result
    case = draw(plan, seed)
    for schedule in strategies.portfolio(seed, plan.strategy):
        scheduled = msgspec.structs.replace(case, schedule=schedule)
        chance = Chance(seed, "twice?", str(schedule.strategy))
        run = judge(scheduled, thorough=chance.often(TWICE))
        result.take(seed, scheduled, run)
        if run.finding is None and chance.often(TWICE):
            result.twice += 1
            _run_twice(seed, scheduled, result)
    return result


def _search(case: Case, seed: int, result: Result) -> None:
    """Every schedule with few holds."""

    def run(schedule: Schedule) -> Judgement:
        scheduled = msgspec.structs.replace(case, schedule=schedule)
        made = judge(scheduled)
        result.take(seed, scheduled, made)
        return made

    search = strategies.FewHolds(run, HOLDS_BUDGET, SCHEDULES_MOST)
    for _ in search:
        pass
    result.searched["complete" if search.complete else "capped"] += 1


def _run_twice(seed: int, case: Case, result: Result) -> None:
    """The same log, bit for bit; and the same actions when its events are fed through `decide`."""
    once, again = Replay(case), Replay(case)
    if once.digest != again.digest:
        text = "the same case gave two logs"
        result.fail(seed, case, Finding(rule="nondeterminism", outcome=once.judgement.outcome, text=text))
    elif not any(fault.kind == "restart_control_plane" for fault in case.scenario.faults):
        # What arrives while the control plane is away is logged, but decided on later.
        divergence = replay(header_of(case.scenario, "sim"), once.log.entries)
        if divergence is not None:
            result.fail(seed, case, Finding(rule="replay", outcome=once.judgement.outcome, text=str(divergence)))


def _portion(plan: Plan, seeds: range) -> list[Result]:
    results = [explore(plan, seed) for seed in seeds]
    gc.collect()  # worlds are cycles, and a run begins by putting everything before it out of the collector's sight
    return results


# --- many seeds -------------------------------------------------------------------------------------------


def campaign(plan: Plan, seeds: range, jobs: int, time_s: float | None = None) -> Iterator[Result]:
    """The result of each seed, in order; ends early once `time_s` is over."""
    end = None if time_s is None else time.monotonic() + time_s
    portions = (seeds[i : i + PORTION] for i in range(0, len(seeds), PORTION))
    if jobs == 1:
        for portion in portions:
            for seed in portion:
                if end is not None and time.monotonic() >= end:
                    return
                yield explore(plan, seed)
            gc.collect()
        return
    with _pool(jobs) as pool:
        window: deque[AsyncResult[list[Result]]] = deque()
        for portion in portions:
            if end is not None and time.monotonic() >= end:
                break
            window.append(pool.apply_async(_portion, (plan, portion)))
            if len(window) > 2 * jobs:
                yield from window.popleft().get()
        while window:
            yield from window.popleft().get()


def _pool(jobs: int) -> Pool:
    # Fresh processes, not copies of this one: a worker's first run and its hundredth must be alike.
    context = multiprocessing.get_context("spawn")
    return context.Pool(jobs, initializer=_deaf, maxtasksperchild=PORTIONS_EACH)


def _deaf() -> None:
    """An interrupt is for the process that counts; it ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
