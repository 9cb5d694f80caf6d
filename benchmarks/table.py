"""What a benchmark answers with: rows, each with a bound or none; how they are timed and shown.

Processor time, not wall time, and the best of several repetitions: the machine is shared, and what takes longer than
the best was somebody else's doing. So a miss is measured again before it is believed, and what is too long to repeat is
set against the `Weather` meanwhile. Bounds are the issues', in their units; a row without one is for information.
"""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table; without a bound a row is for information and always ok."""

    name: str
    value: float
    unit: str
    bound: float | None
    ok: bool
    least: bool = False
    """The bound is the least that the value may be, not the most."""


def fact(name: str, value: float, unit: str) -> Row:
    return Row(name, value, unit, None, True)


def at_most(name: str, value: float, unit: str, bound: float) -> Row:
    return Row(name, value, unit, bound, value <= bound)


def at_least(name: str, value: float, unit: str, bound: float) -> Row:
    return Row(name, value, unit, bound, value >= bound, True)


PATIENCE = 12
"""How many times the usual repetitions a miss is worth."""


def best_of(repetitions: int, work: Callable[[], object], enough: float = float("inf")) -> float:
    """Processor seconds of the quickest of several runs of `work`, garbage collection left out; of many more, if none
    took at most `enough`."""
    best = float("inf")
    for turn in range(repetitions * PATIENCE):
        if turn >= repetitions and best <= enough:
            break
        gc.collect()
        gc.disable()
        began = time.process_time()
        work()
        spent = time.process_time() - began
        gc.enable()
        best = min(best, spent)
    return best


class Weather:
    """How much slower than at its quietest moment the machine was while something long ran. `sense` now and then."""

    def __init__(self) -> None:
        self._best = float("inf")
        self._total = 0.0
        self._times = 0

    def sense(self) -> None:
        began = time.process_time()
        sum(range(100_000))
        spent = time.process_time() - began
        self._best = min(self._best, spent)
        self._total += spent
        self._times += 1

    @property
    def slowdown(self) -> float:
        return self._total / self._times / self._best if self._times else 1.0

    @property
    def spent_s(self) -> float:
        """What the sensing took itself."""
        return self._total


def show(row: Row) -> str:
    """One line of text."""
    bound = "" if row.bound is None else f"{'at least' if row.least else 'at most'} {row.bound:g}"
    verdict = "" if row.bound is None else "ok" if row.ok else "MISSED"
    return f"{row.name:50} {row.value:9.4g} {row.unit:16} {bound:14} {verdict}".rstrip()
