"""From observations to a cost: the rule by which a constant, a lognormal, samples or a drift is chosen.

In this order, the first that holds:

1. The first of each process is set apart if it always took more than `FIRST` times the most of the others.
2. All within `EQUAL` of each other: a constant, their mean.
3. What was observed early and late differs: stretches of the run explain more than `DRIFTS` of the variance of the
   logarithms, corrected for what chance explains. Then samples that change with the run. Stretches are a batch for
   trajectories, so that what a batch has in common stays together; `STRETCH` times for phases. Trajectories keep their
   order, and get such samples for that alone, if their batches take another time in the recorded order than, on
   average, in random ones: by more than `ORDER`.
4. A lognormal, if the Kolmogorov-Smirnov distance to it is below the critical value at 5 % for fitted parameters
   (Lilliefors, for the logarithms), and its mean is within `MEAN` of the observed one.
5. Else the samples themselves, at most `SAMPLES_MOST`, evenly spaced by rank.
"""

import heapq
import math
import random
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
ORDER = 0.05
SHUFFLES = 10
LISTS_MOST = 40
"""Lists of a drift; more batches than that share lists."""
US = 1_000


def fit(seen: Sequence[Observation], stretch: int = STRETCH) -> Cost:
    """A cost in ns (whole us) for what was observed at least once. `stretch`: numbers that belong together."""
    first, usual = first_apart(seen)
    cost = _fit(usual, stretch)
    if not first:
        return cost
    durations = constant(cost) if isinstance(cost, int) else cost
    return msgspec.structs.replace(durations, first=_us(fmean(first)))


def fit_lengths(seen: Sequence[Observation], slots: int) -> Durations:
    """Likewise for trajectories, `slots` of which run at once. None is a first one: compiling is a cost of its own."""
    if len(seen) >= DRIFT_LEAST and abs(_order(_stretches(seen, 1), slots) - 1) > ORDER:
        return _drift(seen, 1, in_order=True)
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


def first_apart(seen: Sequence[Observation]) -> tuple[list[int], Sequence[Observation]]:
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
        return _drift(seen, stretch)
    return _lognormal(took) or Durations(samples=_thinned(took))


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


def _drift(seen: Sequence[Observation], stretch: int, *, in_order: bool = False) -> Durations:
    """Lists by stretch, or by several where there are more than `LISTS_MOST`; where nothing was seen, the nearest."""
    last = max(one.number for one in seen) // stretch
    width = stretch * -(-(last + 1) // LISTS_MOST)
    lists: dict[int, list[list[int]]] = {}
    for k, took in enumerate(_by_number(seen, stretch)):
        if took:
            lists.setdefault(k * stretch // width, []).append(took)
    filled = []
    for k in range(last * stretch // width + 1):
        nearest = lists[min(lists, key=lambda have: (abs(have - k), have))]
        filled.append(_merged(nearest) if in_order else _thinned([one for took in nearest for one in took]))
    return Durations(drift=tuple(filled), every=width, in_order=in_order)


def _by_number(seen: Sequence[Observation], width: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(max(one.number for one in seen) // width + 1)]
    for one in seen:
        found[one.number // width].append(one.took)
    return found


def _merged(batches: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Several batches as one, each trajectory at its place."""
    places = [((i + 0.5) / len(batch), took) for batch in batches for i, took in enumerate(batch)]
    ordered = [_us(took) for _, took in sorted(places, key=lambda place: place[0])]
    return tuple(_every_nth(ordered, SAMPLES_MOST))


def _order(batches: Sequence[Sequence[int]], slots: int) -> float:
    """What batches take in their own order, over what they take in random ones, when `slots` of each run at once."""
    shuffled, own = 0.0, 0.0
    chance = random.Random(0)
    for batch in batches:
        own += _packed(batch, slots)
        shuffled += fmean(_packed(chance.sample(batch, len(batch)), slots) for _ in range(SHUFFLES))
    return own / shuffled if shuffled else 1.0


def _packed(batch: Sequence[int], slots: int) -> int:
    """When the last one ends."""
    ends = [0] * slots
    for took in batch:
        heapq.heappush(ends, heapq.heappop(ends) + took)
    return max(ends)


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


def _thinned(took: Sequence[int]) -> tuple[int, ...]:
    """At most `SAMPLES_MOST` of them in ascending order, evenly spaced by rank."""
    return tuple(_every_nth([_us(value) for value in sorted(took)], SAMPLES_MOST))


def _every_nth(values: Sequence[int], most: int) -> Sequence[int]:
    if len(values) <= most:
        return values
    return [values[(2 * i + 1) * len(values) // (2 * most)] for i in range(most)]


def _us(nanos: float) -> int:
    """Whole microseconds: what a scenario file can say and read again exactly."""
    return round(nanos / US) * US
