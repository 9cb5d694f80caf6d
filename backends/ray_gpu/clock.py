"""Real time as the core counts it: integer ns since the control plane began.

All processes of a cluster count from one instant, the *epoch*, given as Unix time in ns. Within a process time is
monotonic: it is read once from the wall clock and then follows the monotonic clock, so that a step of the wall clock
moves nothing. Between nodes it is as exact as their clocks agree; nothing in the core compares times of two nodes.
"""

import asyncio
import time
from collections.abc import Callable


class _Timer:
    __slots__ = ("_clock", "_handle")

    def __init__(self, clock: "RealClock", delay_s: float, callback: Callable[[], None], daemon: bool) -> None:
        self._clock = None if daemon else clock
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._ring, callback)
        if not daemon:
            clock.pending += 1

    def _ring(self, callback: Callable[[], None]) -> None:
        self._over()
        callback()

    def cancel(self) -> None:
        self._handle.cancel()
        self._over()

    def _over(self) -> None:
        if self._clock is not None:
            self._clock.pending -= 1
            self._clock = None


class RealClock:
    """A `core.backend.Clock` on an asyncio event loop."""

    def __init__(self, epoch_ns: int) -> None:
        """`epoch_ns`: Unix time at which this clock shows 0."""
        self._offset = time.time_ns() - epoch_ns - time.monotonic_ns()
        self._latest = 0
        self.pending = 0
        """Timers that run and are no daemons: reasons to believe that something will still happen."""

    def now_ns(self) -> int:
        """ns since the epoch; never decreases."""
        self._latest = max(self._latest, time.monotonic_ns() + self._offset)
        return self._latest

    def catch_up(self, now_ns: int) -> None:
        """Never show less than this from now on: what another process has already seen."""
        self._latest = max(self._latest, now_ns)

    def call_at_ns(self, when_ns: int, callback: Callable[[], None], *, daemon: bool = False) -> _Timer:
        """Call back on the running loop at `when_ns`, or as soon as it can."""
        return _Timer(self, max(0, when_ns - self.now_ns()) / 1e9, callback, daemon)
