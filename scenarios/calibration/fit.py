"""From observations to a cost: the rule by which a constant, a lognormal, samples or a drift is chosen.

In this order, the first that holds:

1. The first of each process is set apart if it always took more than `FIRST` times the most of the others.
2. All within `EQUAL` of each other: a constant, their mean.
3. What was observed early and late differs: stretches of the run explain more than `DRIFTS` of the variance of the
   logarithms, corrected for what chance explains. Then samples that change with the run. Stretches are a batch for
   trajectories, so that what a batch has in common stays together; `STRETCH` times for phases.
4. A lognormal, if the Kolmogorov-Smirnov distance to it is below the critical value at 5 % for fitted parameters
   (Lilliefors, for the logarithms), and its mean is within `MEAN` of the observed one.
5. Else the samples themselves, at most `SAMPLES_MOST`, evenly spaced by rank.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import msgspec

from core.config import Cost, Durations
from core.lengths import SIGMA_UNIT
from scenarios.calibration.measure import Observation

FIRST = 1.5
OTHERS_LEAST = 3
EQUAL = 0.02
DRIFTS = 0.2
DRIFT_LEAST = 20
"""Fewer observations show no drift."""
STRETCH = 5
MEAN = 0.02
LILLIEFORS = 0.886
"""Critical distance at 5 % times the square root of n, for n above 30 (H. Lilliefors, JASA 62, 1967); below, stricter
than its tables."""
LOGNORMAL_LEAST = 8
SAMPLES_MOST = 200
LISTS_MOST = 40
"""Lists of a drift; more batches than that share lists."""
US = 1_000


def fit(seen: Sequence[Observation], stretch: int = STRETCH) -> Cost:
    """A cost in ns (whole us) for what was observed at least once. `stretch`: numbers that belong together."""
    first, usual = _apart(seen)
    cost = _fit(usual, stretch)
    if not first:
        return cost
    durations = constant(cost) if isinstance(cost, int) else cost
    return msgspec.structs.replace(durations, first=_us(fmean(first)))


def fit_lengths(seen: Sequence[Observation]) -> Durations:
    """Likewise for trajectories, which have no first one: compiling is a cost of its own."""
    cost = _fit(seen, 1)
    return constant(max(US, cost)) if isinstance(cost, int) else cost


def constant(nanos: int) -> Durations:
    return Durations(parts=((1.0, "constant", nanos, 0),))


def mean(cost: Cost) -> float:
    """Expectation (ns) of a cost, but for the first of a process."""
    if isinstance(cost, int):
        return cost
    samples = [value for values in cost.drift for value in values] or cost.samples
    if samples:
        return fmean(samples)
    whole = sum(weight for weight, *_ in cost.parts)
    return sum(weight * _mean_of(kind, a, b) for weight, kind, a, b in cost.parts) / whole


def _mean_of(kind: str, a: int, b: int) -> float:
    match kind:
        case "lognormal":
            return a * math.exp((b / SIGMA_UNIT) ** 2 / 2)
        case "uniform":
            return (a + b) / 2
        case _:
            return a


def _apart(seen: Sequence[Observation]) -> tuple[list[int], Sequence[Observation]]:
    """The first of each process, if they are another matter, and the rest."""
    first = [one.took for one in seen if one.first]
    rest = [one for one in seen if not one.first]
    if len(rest) >= OTHERS_LEAST and min(first) > FIRST * max(one.took for one in rest):
        return first, rest
    return [], seen


def _fit(seen: Sequence[Observation], stretch: int) -> Cost:
    took = [one.took for one in seen]
    middle = fmean(took)
    if max(took) - min(took) <= EQUAL * middle:
        return _us(middle)
    lists = _stretches(seen, stretch)
    if len(took) >= DRIFT_LEAST and _explained(lists) > DRIFTS:
        return _drift(seen, stretch, len(lists))
    return _lognormal(took) or Durations(samples=_thinned(took, SAMPLES_MOST))


# --- drift ------------------------------------------------------------------------------------------------


def _stretches(seen: Sequence[Observation], width: int) -> list[list[int]]:
    """What was observed in each stretch of `width` numbers that has any, in order."""
    lists: dict[int, list[int]] = {}
    for one in seen:
        lists.setdefault(one.number // width, []).append(one.took)
    return [lists[k] for k in sorted(lists)]


def _explained(lists: Sequence[Sequence[int]]) -> float:
    """Share of the variance of the logarithms between the lists, corrected for their number (adjusted R squared)."""
    logs = [[math.log(max(1, value)) for value in values] for values in lists]
    every = [value for values in logs for value in values]
    middle = fmean(every)
    total = sum((value - middle) ** 2 for value in every)
    within = sum((value - fmean(values)) ** 2 for values in logs for value in values)
    spare = len(every) - len(lists)
    return 1 - within / total * (len(every) - 1) / spare if spare > 0 and total > 0 else 0.0


def _drift(seen: Sequence[Observation], stretch: int, stretches: int) -> Durations:
    width = stretch * -(-stretches // LISTS_MOST)
    last = max(one.number for one in seen) // width
    lists: dict[int, list[int]] = {}
    for one in seen:
        lists.setdefault(one.number // width, []).append(one.took)
    filled: list[tuple[int, ...]] = []
    for k in range(last + 1):
        nearest = min(lists, key=lambda have: (abs(have - k), have))
        filled.append(_thinned(lists[nearest], SAMPLES_MOST))
    return Durations(drift=tuple(filled), every=width)


# --- shapes -----------------------------------------------------------------------------------------------


def _lognormal(took: Sequence[int]) -> Durations | None:
    """The lognormal of these, if they are one."""
    if len(took) < LOGNORMAL_LEAST or min(took) <= 0:
        return None
    logs = sorted(math.log(value) for value in took)
    middle, sigma = fmean(logs), stdev(logs)
    fitted = NormalDist(middle, sigma)
    n = len(logs)
    distance = max(max((i + 1) / n - fitted.cdf(x), fitted.cdf(x) - i / n) for i, x in enumerate(logs))
    shape = Durations(parts=((1.0, "lognormal", _us(math.exp(middle)), round(sigma * SIGMA_UNIT)),))
    if distance > LILLIEFORS / math.sqrt(n) or abs(mean(shape) / fmean(took) - 1) > MEAN:
        return None
    return shape


def _thinned(took: Sequence[int], most: int) -> tuple[int, ...]:
    """At most so many of them in ascending order, evenly spaced by rank."""
    ordered = [_us(value) for value in sorted(took)]
    if len(ordered) <= most:
        return tuple(ordered)
    return tuple(ordered[(2 * i + 1) * len(ordered) // (2 * most)] for i in range(most))


def _us(nanos: float) -> int:
    """Whole microseconds: what a scenario file can say and read again exactly."""
    return round(nanos / US) * US
