"""How many engines each pipeline should have: proportional shares with a floor of one engine.

Pure arithmetic on plain data. Shares are in GPUs, in proportion to the remaining work (trajectories x TP), as even
as the mappings allow (weighted max-min), each at least one engine where that is possible, and rounded by largest
remainder, so that no GPU is left over that somebody could use.
"""

from collections.abc import Sequence
from operator import sub

SWEEPS = 12
"""Rounds of balancing between classes that share pipelines. Each round shrinks the imbalance by a constant factor;
12 leave less than a hundredth of a GPU on random overlaps (tests/test_planner.py bounds what that costs)."""

CLOSE_ENOUGH = 1e-3
"""GPUs: a sweep that moved less than this is the last."""


class Claim:
    """What one pipeline asks of the region being shared out, in GPUs."""

    __slots__ = ("weight", "floor", "ceiling", "base", "share")

    def __init__(self, weight: int, floor: int, ceiling: int, base: int) -> None:
        self.weight = weight
        """Remaining work: trajectories x TP; positive."""
        self.floor = floor
        """GPUs of one engine."""
        self.ceiling = ceiling
        """GPUs of as many engines as could have something to do."""
        self.base = base
        """GPUs it has outside the region."""
        self.share = float(base)
        """The answer: GPUs inside and outside the region."""


class _Class:
    """GPUs that the same claims can use, and what each claim gets of them so far."""

    __slots__ = ("available", "claims", "parts", "seen")

    def __init__(self, available: int, claims: Sequence[Claim]) -> None:
        self.available = available
        self.claims = claims
        self.parts = [0.0] * len(claims)
        self.seen: list[float] = []
        """Everyone's share when this class was last poured: while that is so, pouring again changes nothing."""


def balance(classes: Sequence[tuple[int, Sequence[Claim]]]) -> list[list[float]]:
    """Set every claim's `share`. `classes`: (GPUs available, claims that can use them), in a fixed order. Returns what
    each class gives to each of its claims."""
    pools = [_Class(available, claims) for available, claims in classes]
    for _ in range(SWEEPS):
        moved = 0.0
        for pool in pools:
            moved = max(moved, _pour(pool))
        if moved < CLOSE_ENOUGH:
            break
    return [pool.parts for pool in pools]


def _pour(pool: _Class) -> float:
    """Share one class out, the other classes' part taken as given. Returns the largest change (GPUs)."""
    claims = pool.claims
    shares = [claim.share for claim in claims]
    if shares == pool.seen:
        return 0.0
    before = pool.parts
    rest = [share - part for share, part in zip(shares, before, strict=True)]
    pool.parts = _parts(pool.available, claims, rest)
    pool.seen = [given + part for given, part in zip(rest, pool.parts, strict=True)]
    for claim, share in zip(claims, pool.seen, strict=True):
        claim.share = share
    return max(map(abs, map(sub, pool.parts, before)))


def _parts(available: int, claims: Sequence[Claim], rest: Sequence[float]) -> list[float]:
    """What each claim gets of a class. Most classes are simple: enough for all, or one claim."""
    most = [max(0.0, claim.ceiling - given) for claim, given in zip(claims, rest, strict=True)]
    if sum(most) <= available:
        return most
    if len(claims) == 1:
        return [float(available)]
    level = _level(available, claims, rest)
    return [max(0.0, _wanted(claim, level) - given) for claim, given in zip(claims, rest, strict=True)]


def _wanted(claim: Claim, level: float) -> float:
    """The share at a water level. Levels from -1 to 0 fill the floors, above 0 by weight up to the ceiling."""
    if level <= 0:
        return claim.floor * (1 + level)
    return min(max(level * claim.weight, claim.floor), claim.ceiling)


def _used(level: float, claims: Sequence[Claim], rest: Sequence[float]) -> float:
    """GPUs handed out at a level: the sum of what is `_wanted` beyond what is given, written out for speed."""
    used = 0.0
    for claim, given in zip(claims, rest, strict=True):
        if level <= 0:
            more = claim.floor * (1 + level) - given
        else:
            more = level * claim.weight
            if more < claim.floor:
                more = claim.floor
            if more > claim.ceiling:
                more = claim.ceiling
            more -= given
        if more > 0:
            used += more
    return used


def _level(available: int, claims: Sequence[Claim], rest: Sequence[float]) -> float:
    """The highest water level at which the class's GPUs suffice (its ceiling, if they are more than enough)."""
    levels = _edges(claims, rest)
    low, high = 0, len(levels) - 1
    above = _used(levels[high], claims, rest)
    if above <= available:
        return levels[high]
    below = -1.0
    while high - low > 1:  # between two neighbouring edges `_used` is a straight line
        middle = (low + high) // 2
        used = _used(levels[middle], claims, rest)
        if used <= available:
            low, below = middle, used
        else:
            high, above = middle, used
    if not low:
        below = _used(levels[0], claims, rest)
    if above <= below:
        return levels[low]
    return levels[low] + (levels[high] - levels[low]) * (available - below) / (above - below)


def _edges(claims: Sequence[Claim], rest: Sequence[float]) -> list[float]:
    """The levels at which somebody's share begins or ceases to grow, ascending."""
    edges = {-1.0, 0.0}
    for claim, given in zip(claims, rest, strict=True):
        weight, floor = claim.weight, claim.floor
        edges.add(claim.ceiling / weight)
        edges.add(floor / weight)
        if given > 0:
            edges.add(given / weight if given > floor else given / floor - 1)
    return sorted(edges)


def round_off(shares: Sequence[tuple[float, int, int]], available: int) -> list[int]:
    """Whole engines from shares by largest remainder. `shares`: (engines wanted, GPUs an engine, most engines).

    Everyone gets the whole part, at least one (even if they cannot all have one: then they take turns); what is
    left of `available` GPUs goes by largest remainder, ties to whoever is first.
    """
    engines = [min(max(1, int(share + 1e-6)), most) for share, _, most in shares]
    left = available - sum(n * tp for n, (_, tp, _) in zip(engines, shares, strict=True))
    order = sorted(range(len(shares)), key=lambda i: (-round(shares[i][0] - engines[i], 6), i))
    while left > 0:
        given = 0
        for i in order:
            _, tp, most = shares[i]
            if tp <= left and engines[i] < most:
                engines[i] += 1
                left -= tp
                given += 1
        if not given:
            break
    return engines
