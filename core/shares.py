"""How many engines each pipeline should have: proportional shares with a floor of one engine.

Pure arithmetic on plain data. Shares are in GPUs, in proportion to the remaining work (trajectories x TP), as even
as the mappings allow (weighted max-min), each at least one engine where that is possible, and rounded by largest
remainder, so that no GPU is left over that somebody could use.
"""

from bisect import bisect
from collections.abc import Sequence
from operator import add, sub

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


_Row = tuple[int, int, int, float]
"""Of a claim: weight, floor, ceiling, and the GPUs given to it elsewhere."""


class _Class:
    """GPUs that the same claims can use, and what each claim gets of them so far."""

    __slots__ = ("available", "claims", "edges", "level", "parts", "seen")

    def __init__(self, available: int, claims: Sequence[Claim]) -> None:
        self.available = available
        self.claims = claims
        self.edges: list[float] = []
        """Made when first asked for: many classes have enough for all."""
        self.level = 0.0
        """Where the water stood when it was last poured; it does not move far from there."""
        self.parts = [0.0] * len(claims)
        self.seen: list[float] = []
        """Everyone's share when this class was last poured: while that is so, pouring again changes nothing."""


def balance(classes: Sequence[tuple[int, Sequence[Claim]]]) -> list[list[float]]:
    """Set every claim's `share`. `classes`: (GPUs available, claims that can use them), in a fixed order. Returns what
    each class gives to each of its claims."""
    pools = [_Class(available, claims) for available, claims in classes]
    for _ in range(SWEEPS):
        if max([_pour(pool) for pool in pools], default=0.0) < CLOSE_ENOUGH:
            break
    return [pool.parts for pool in pools]


def _pour(pool: _Class) -> float:
    """Share one class out, the other classes' part taken as given. Returns the largest change (GPUs)."""
    claims = pool.claims
    shares = [claim.share for claim in claims]
    if shares == pool.seen:
        return 0.0
    before = pool.parts
    rest = list(map(sub, shares, before))
    pool.parts = _alone(pool, rest[0]) if len(rest) == 1 else _parts(pool, rest)
    pool.seen = list(map(add, rest, pool.parts))
    for claim, share in zip(claims, pool.seen, strict=True):
        claim.share = share
    return max(map(abs, map(sub, pool.parts, before)))


def _alone(pool: _Class, given: float) -> list[float]:
    """What its only claim gets of a class."""
    most = max(0.0, pool.claims[0].ceiling - given)
    return [most if most <= pool.available else float(pool.available)]


def _parts(pool: _Class, rest: Sequence[float]) -> list[float]:
    """What each claim gets of a class. Many classes are simple: enough for all."""
    rows = [
        (claim.weight, claim.floor, claim.ceiling, given) for claim, given in zip(pool.claims, rest, strict=True)
    ]
    most = [ceiling - given if ceiling > given else 0.0 for _, _, ceiling, given in rows]
    if sum(most) <= pool.available:
        return most
    if not pool.edges:
        pool.edges = _edges(pool.claims)
        pool.level = pool.edges[len(pool.edges) // 2]
    moved = [given / weight if given > floor else given / floor - 1 for weight, floor, _, given in rows if given > 0]
    levels = sorted(dict.fromkeys(pool.edges + moved)) if moved else pool.edges
    pool.level = _level(pool.available, rows, levels, pool.level)
    return _beyond(pool.level, rows)


def _beyond(level: float, rows: Sequence[_Row]) -> list[float]:
    """What each claim gets at a water level beyond what is given to it elsewhere. Levels from -1 to 0 fill the floors,
    above 0 by weight up to the ceiling."""
    parts = []
    for weight, floor, ceiling, given in rows:
        if level <= 0:
            share = floor * (1 + level)
        else:
            share = level * weight
            if share < floor:
                share = floor
            if share > ceiling:
                share = ceiling
        parts.append(share - given if share > given else 0.0)
    return parts


def _used(level: float, rows: Sequence[_Row]) -> float:
    """GPUs handed out at a level: the sum of `_beyond`, written out for speed."""
    used = 0.0
    if level <= 0:
        for _, floor, _, given in rows:
            more = floor * (1 + level) - given
            if more > 0:
                used += more
        return used
    for weight, floor, ceiling, given in rows:
        more = level * weight
        if more < floor:
            more = floor
        if more > ceiling:
            more = ceiling
        if more > given:
            used += more - given
    return used


def _level(available: int, rows: Sequence[_Row], levels: Sequence[float], near: float) -> float:
    """The highest water level at which the class's GPUs suffice (its ceiling, if they are more than enough). `levels`:
    those at which somebody's share begins or ceases to grow, ascending: between two neighbours `_used` is a straight
    line. `near`: where to look first."""
    top = len(levels) - 1
    high = min(bisect(levels, near), top)
    low = high - 1
    below, above = _used(levels[low], rows), _used(levels[high], rows)
    while above <= available and high < top:
        low, below, high = high, above, high + 1
        above = _used(levels[high], rows)
    while below > available and low > 0:
        high, above, low = low, below, low - 1
        below = _used(levels[low], rows)
    if above <= available:
        return levels[high]
    if above <= below:
        return levels[low]
    return levels[low] + (levels[high] - levels[low]) * (available - below) / (above - below)


def _edges(claims: Sequence[Claim]) -> list[float]:
    """The levels at which somebody's share begins or ceases to grow where nothing is given elsewhere, ascending."""
    edges = [-1.0, 0.0]
    for claim in claims:
        edges += (claim.ceiling / claim.weight, claim.floor / claim.weight)
    return sorted(dict.fromkeys(edges))


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
