"""How many engines each pipeline should have: proportional shares with a floor of one engine.

Pure arithmetic on plain data. Shares are in GPUs, in proportion to the remaining work (trajectories x TP), as even
as the mappings allow (weighted max-min), each at least one engine where that is possible, and rounded by largest
remainder, so that no GPU is left over that somebody could use.
"""

from collections.abc import Sequence

SWEEPS = 12
"""Rounds of balancing between classes that share pipelines. Each round shrinks the imbalance by a constant factor;
12 leave less than a hundredth of a GPU on random overlaps (tests/test_shares.py measures it)."""

CLOSE_ENOUGH = 1e-3
"""GPUs: a sweep that moved less than this is the last."""


class Claim:
    """What one pipeline asks of the region being shared out, in GPUs."""

    __slots__ = ("weight", "floor", "ceiling", "base", "by_class", "share")

    def __init__(self, weight: int, floor: int, ceiling: int, base: int) -> None:
        self.weight = weight
        """Remaining work: trajectories x TP; positive."""
        self.floor = floor
        """GPUs of one engine."""
        self.ceiling = ceiling
        """GPUs of as many engines as could have something to do."""
        self.base = base
        """GPUs it has outside the region."""
        self.by_class: dict[int, float] = {}
        self.share = float(base)
        """The answer: GPUs inside and outside the region."""


def balance(classes: Sequence[tuple[int, Sequence[Claim]]]) -> None:
    """Set every claim's `share`. `classes`: (GPUs available, claims that can use them), in a fixed order."""
    sweeps = 1 if len(classes) == 1 else SWEEPS
    for _ in range(sweeps):
        moved = 0.0
        for number, (available, claims) in enumerate(classes):
            moved = max(moved, _pour(number, available, claims))
        if moved < CLOSE_ENOUGH:
            break


def _pour(number: int, available: int, claims: Sequence[Claim]) -> float:
    """Share one class out, the other classes' part taken as given. Returns the largest change (GPUs)."""
    rest = [claim.share - claim.by_class.get(number, 0.0) for claim in claims]
    level = _level(available, claims, rest)
    moved = 0.0
    for claim, given in zip(claims, rest, strict=True):
        mine = max(0.0, _wanted(claim, level) - given)
        moved = max(moved, abs(mine - claim.by_class.get(number, 0.0)))
        claim.by_class[number] = mine
        claim.share = given + mine
    return moved


def _wanted(claim: Claim, level: float) -> float:
    """The share at a water level. Levels from -1 to 0 fill the floors, above 0 by weight up to the ceiling."""
    if level <= 0:
        return claim.floor * (1 + level)
    return min(max(level * claim.weight, claim.floor), claim.ceiling)


def _level(available: int, claims: Sequence[Claim], rest: Sequence[float]) -> float:
    """The highest water level at which the class's GPUs suffice (its ceiling, if they are more than enough)."""
    edges = {-1.0, 0.0}
    for claim, given in zip(claims, rest, strict=True):
        edges.add(claim.ceiling / claim.weight)
        edges.add(claim.floor / claim.weight)
        if given > 0:
            edges.add(given / claim.weight if given > claim.floor else given / claim.floor - 1)
    levels = sorted(edges)

    def used(level: float) -> float:
        return sum(max(0.0, _wanted(claim, level) - given) for claim, given in zip(claims, rest, strict=True))

    low, high = 0, len(levels) - 1
    if used(levels[high]) <= available:
        return levels[high]
    while high - low > 1:  # between two neighbouring edges `used` is a straight line
        middle = (low + high) // 2
        if used(levels[middle]) <= available:
            low = middle
        else:
            high = middle
    below, above = used(levels[low]), used(levels[high])
    if above <= below:
        return levels[low]
    return levels[low] + (levels[high] - levels[low]) * (available - below) / (above - below)


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
