"""How close a run came to its bounds: of each rule with a bound, the wait that used the largest part of its own.

1. A wait lasts as its oracle's clock says: it ends when that clock stops or starts again, or with the run.
2. Parts of bounds are compared as whole numbers, and of two that are equal the first stays: the same run gives the same
   answer anywhere, and so do the same runs added up in the same order.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from core.units import seconds, show_s

MEANING = {"L1": "rollout", "L2": "cut off", "L3": "grant"}
"""What is waited for, by the rule that bounds it. L2: for the end of a pipeline that has no engine left to wait for."""

PARTS = ((1_000, "< 0.1 %"), (100, "< 1 %"), (10, "< 10 %"), (2, "< 50 %"), (1, "< 100 %"))
"""(n, name of the waits that used less than the n-th part of their bound)."""
OVER = ">= 100 %"
BANDS = (*(name for _, name in PARTS), OVER)
"""How close a wait came, roughly, from far to near."""


class Wait(NamedTuple):
    rule: str
    pipeline: str
    wanted: str
    """`a trajectory`, or the priority of a request."""
    waited_ns: int
    bound_ns: int

    @property
    def percent(self) -> float:
        """Of its bound. For people; comparisons are `closer` and `band`."""
        return 100 * self.waited_ns / self.bound_ns

    @property
    def band(self) -> str:
        """How close it came, roughly: one of `BANDS`."""
        for part, name in PARTS:
            if self.waited_ns * part < self.bound_ns:
                return name
        return OVER

    def closer(self, other: "Wait") -> bool:
        """Whether it used a larger part of its bound than the other one of its."""
        return self.waited_ns * other.bound_ns > other.waited_ns * self.bound_ns

    def __str__(self) -> str:
        return f"{self.pipeline} waited {show_s(self.waited_ns)} of {show_s(self.bound_ns)} for {self.wanted}"

    def summary(self) -> dict[str, Any]:
        """As an item of `closest` in `--json`."""
        return {
            "rule": self.rule,
            "pipeline": self.pipeline,
            "wanted": self.wanted,
            "waited_s": seconds(self.waited_ns),
            "bound_s": seconds(self.bound_ns),
        }


class Closest:
    """The closest wait of each rule, among those it was given."""

    def __init__(self, waits: Iterable[Wait] = ()) -> None:
        self._waits: dict[str, Wait] = {}
        for wait in waits:
            self.take(wait)

    def take(self, wait: Wait) -> bool:
        """Whether this is the closest so far."""
        known = self._waits.get(wait.rule)
        if known is not None and not wait.closer(known):
            return False
        self._waits[wait.rule] = wait
        return True

    def waits(self) -> tuple[Wait, ...]:
        """One of each rule that had any, in the order of rules."""
        return tuple(self._waits[rule] for rule in sorted(self._waits))
