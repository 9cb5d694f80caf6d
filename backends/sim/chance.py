"""Chance: draws that depend on nothing but what they are for.

Rules of this room:

1. A draw is a pure function of (seed, stream, names, numbers): `Stream(seed, "trajectory", "p1").pair(batch, index)`.
   There is no generator whose state moves on, so no draw shifts another: a fault in one pipeline, or one draw more
   in this file, leaves every other draw what it was (S7).
2. A trajectory's length is drawn by (pipeline, batch, trajectory) and not by attempt: its prompt decides how long it
   gets, and whoever has to repeat it pays the same again.
3. Uniforms lie strictly between 0 and 1.

Measured on Python 3.11: a keyed blake2b of 16 bytes, copied from a prepared state, costs 1.7 us a draw;
`random.Random("...").random()` 9 us. A splitmix64 written in Python is no faster (1.9 us).
"""

import math
from bisect import bisect
from collections.abc import Callable
from hashlib import blake2b
from itertools import accumulate
from statistics import NormalDist
from struct import Struct

from core.config import Cost, Durations
from core.lengths import SIGMA_UNIT

Sampler = Callable[[float, float], int]

_halves = Struct("<QQ").unpack
_normal = NormalDist().inv_cdf
UNIT = 2.0**-52
US = 1_000
NEIGHBOURS = 1.5
"""Drawn in order, it is one of so many places before or after, itself included: three in all."""


class Stream:
    """All draws for one purpose and one entity; the numbers given to `pair` name the single draw."""

    __slots__ = ("_prepared",)

    def __init__(self, seed: int, *names: str) -> None:
        self._prepared = blake2b("\x1f".join((str(seed), *names)).encode(), digest_size=16)

    def pair(self, *numbers: int) -> tuple[float, float]:
        """Two independent uniforms."""
        keyed = self._prepared.copy()
        keyed.update(repr(numbers).encode())
        first, second = _halves(keyed.digest())
        # 52 of 64 bits, and a half, so that neither 0 nor 1 comes out.
        return ((first >> 12) + 0.5) * UNIT, ((second >> 12) + 0.5) * UNIT


class Draws:
    """Durations (ns) drawn from one distribution, one a key. Where it drifts, the key's first number says how far;
    where it is in order, the second says at which place of `places`."""

    __slots__ = ("_drift", "_every", "_in_order", "_pair", "_places", "_sample")

    def __init__(self, durations: Durations, stream: Stream, places: int = 1) -> None:
        self._drift = [_from_samples(samples) for samples in durations.drift]
        self._every = durations.every
        self._in_order = durations.in_order
        self._places = places
        self._sample = self._drift[0] if self._drift else sampler(durations)
        self._pair = stream.pair

    def of(self, *numbers: int) -> int:
        if self._drift:
            sample = self._drift[min(numbers[0] // self._every, len(self._drift) - 1)]
            u, v = self._pair(*numbers)
            return sample(self._near(numbers[1], u) if self._in_order else u, v)
        return self._sample(*self._pair(*numbers))

    def _near(self, place: int, u: float) -> float:
        """Where about a place among all of them lies: as a uniform, but from its neighbourhood."""
        near = (place + 0.5 + NEIGHBOURS * (2 * u - 1)) / self._places
        return min(max(near, UNIT), 1 - UNIT)


class Price:
    """What one kind of work costs one worker (ns), time after time: the n-th time is drawn by n. A constant draws
    nothing."""

    __slots__ = ("_constant", "_draws", "_first", "_fresh", "_times")

    def __init__(self, cost: Cost, seed: int, *names: str) -> None:
        self._draws: Draws | None = None
        self._constant = self._first = self._times = 0
        self._fresh = True
        if isinstance(cost, int):
            self._constant = cost
        else:
            self._draws = Draws(cost, Stream(seed, "cost", *names))
            self._first = cost.first

    def next(self) -> int:
        if self._draws is None:
            return self._constant
        fresh, self._fresh = self._fresh, False
        self._times += 1
        return self._first if fresh and self._first else self._draws.of(self._times - 1)

    def renew(self) -> None:
        """Another process does the work from now on."""
        self._fresh = True


def sampler(durations: Durations) -> Sampler:
    """How to turn two uniforms into a duration: the first chooses a part of the mixture, the second a value in it."""
    if durations.samples:
        return _from_samples(durations.samples)
    parts = [_from_part(kind, a, b) for _, kind, a, b in durations.parts]
    if not parts:
        raise ValueError("a distribution without parts or samples has nothing to draw from")
    if len(parts) == 1:
        return parts[0]
    bounds = list(accumulate(weight for weight, *_ in durations.parts))
    last = len(parts) - 1
    return lambda u, v: parts[min(bisect(bounds, u * bounds[-1]), last)](u, v)


def _from_samples(samples: tuple[int, ...]) -> Sampler:
    return lambda u, v: samples[min(int(u * len(samples)), len(samples) - 1)]


def _from_part(kind: str, a: int, b: int) -> Sampler:
    if kind == "constant":
        return lambda u, v: a
    if kind == "uniform":
        return lambda u, v: a + int(v * (b - a))
    if kind == "lognormal":
        # Whole microseconds: the last bits of `exp` and `log` differ between C libraries.
        return lambda u, v: int(a * math.exp(b / SIGMA_UNIT * _normal(v)) / US) * US
    raise ValueError(f"no distribution is called {kind!r}")
