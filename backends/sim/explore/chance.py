"""Draws for whole worlds. One stream a purpose, so that a draw more for one leaves the others what they were.

Only `random()` of the generator is used: it is the one method whose numbers Python promises to keep.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """A stream of draws, named by a seed and what it is for."""

    def __init__(self, seed: int, *names: str | int) -> None:
        self._random = random.Random(":".join(map(str, (seed, *names)))).random

    def below(self, n: int) -> int:
        """0 to n - 1."""
        return int(self._random() * n)

    def between(self, least: int, most: int) -> int:
        """`least` to `most`, both included."""
        return least + self.below(most - least + 1)

    def often(self, p: float) -> bool:
        return self._random() < p

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different ones, in a drawn order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]
