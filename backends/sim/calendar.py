"""The one calendar of the simulator: SimPy's heap, on an integer nanosecond clock.

Rules of this room:

1. Time is an ``int`` of nanoseconds. A float delay is refused where it is made, before it can shift a tie.
2. A cancelled entry never rings and never moves the clock: it stays in the heap as a tombstone and is dropped
   before ``now`` changes. Plain SimPy cannot cancel; ``AnyOf(1 s, 3600 s)`` would end its run at 3600.
3. A *daemon* entry (heartbeat, watchdog, display) rings like any other, but nobody's progress hangs on it.
   ``live`` counts the rest, so "nothing can happen any more" is one comparison.
4. Ties ring in the order of (SimPy priority, insertion); the last bit of the insertion number marks a daemon.

An entry is a SimPy event, or anything with ``callbacks`` and ``_ok``. As in SimPy, ``callbacks is None`` says that
it is over; here either because it rang or because it was cancelled. ``Alarm`` and ``Nap`` are the two kinds made here.
A ``Bell`` is none: it wakes a task at the instant in which it is rung.
"""

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import simpy
from simpy.core import EmptySchedule, Infinity, StopSimulation
from simpy.events import NORMAL, PENDING

from core.units import NS_PER_S

# Tombstones are cheap, a heap made mostly of them is not: rebuild once they are the majority of a heap this large.
COMPACT_ABOVE = 64


class SimEnv(simpy.Environment):
    """A SimPy environment whose entries can be cancelled and told apart from daemons."""

    def __init__(self) -> None:
        super().__init__(0)
        self._eid = count(0, 2)
        self._dead = 0  # tombstones in the heap
        self._idle = 0  # tombstones and pending daemons: all that nobody waits for

    @property
    def live(self) -> int:
        """Pending entries that are neither cancelled nor daemons."""
        return len(self._queue) - self._idle

    def due(self) -> bool:
        """Whether an entry rings at this very instant."""
        return self.peek() == self._now

    def schedule(self, event: Any, priority: int = NORMAL, delay: int = 0) -> None:
        """Put ``event`` on the calendar ``delay`` nanoseconds from now; SimPy calls this for every event."""
        if delay.__class__ is not int:
            raise TypeError(f"the calendar counts whole nanoseconds, not {delay!r}; convert with core.units.ns()")
        heappush(self._queue, (self._now + delay, priority, next(self._eid), event))

    def push(self, entry: Any, when_ns: int, daemon: bool = False) -> None:
        """Put ``entry`` on the calendar at the absolute ``when_ns`` (not before now)."""
        if daemon:
            entry.daemon = True
            self._idle += 1
            heappush(self._queue, (when_ns, NORMAL, next(self._eid) | 1, entry))
        else:
            heappush(self._queue, (when_ns, NORMAL, next(self._eid), entry))

    def daemon_timeout(self, delay: int, value: Any = None) -> simpy.Event:
        """A timeout nobody's progress hangs on, for background SimPy processes."""
        if delay < 0:
            raise ValueError(f"negative delay {delay}")
        event = simpy.Event(self)
        event._ok = True
        event._value = value
        self.push(event, self._now + delay, daemon=True)
        return event

    def cancel(self, entry: Any) -> None:
        """Make a pending entry a tombstone; without effect once it rang or was cancelled."""
        if entry.callbacks is None:
            return
        if getattr(entry, "_value", None) is PENDING:
            raise ValueError("this event was never triggered, so it is not on the calendar")
        entry.callbacks = None
        self._dead += 1
        if not getattr(entry, "daemon", False):
            self._idle += 1
        if self._dead > COMPACT_ABOVE and self._dead * 2 > len(self._queue):
            self._compact()

    def peek(self) -> float:
        """When the next entry rings, ``inf`` if none does."""
        queue = self._queue
        while queue:
            if queue[0][3].callbacks is not None:
                return queue[0][0]
            heappop(queue)
            self._bury()
        return Infinity

    def step(self) -> None:
        """Ring the next entry: move the clock to it and run its callbacks."""
        queue = self._queue
        while True:
            if not queue:
                raise EmptySchedule
            when, _, eid, event = heappop(queue)
            callbacks = event.callbacks
            if callbacks is not None:
                break
            self._bury()
        if eid & 1:
            self._idle -= 1
        self._now = when
        event.callbacks = None
        try:
            for callback in callbacks:
                callback(event)
        except StopSimulation:
            # ``Environment.run(until=event)`` stops in the midst of the callbacks; the rest is for the next run.
            event.callbacks = list(callbacks[callbacks.index(callback) + 1 :])
            self.schedule(event, -1)
            raise
        if not event._ok and not hasattr(event, "_defused"):
            # SimPy raises a copy made from ``args``; the original keeps its traceback and any constructor.
            raise event._value

    def _bury(self) -> None:
        self._dead -= 1
        self._idle -= 1

    def _compact(self) -> None:
        """Rebuild the heap without tombstones, in place: the loop keeps a reference to the list."""
        queue = self._queue
        queue[:] = [item for item in queue if item[3].callbacks is not None]
        heapify(queue)
        self._idle -= self._dead
        self._dead = 0


def ns_not_before(when: float) -> int:
    """The first nanosecond that reads as at least ``when`` seconds.

    asyncio and anyio re-arm a timer that rings while ``time() < deadline``; rounded to the nearest nanosecond, every
    other deadline would spin.
    """
    nanos = int(when * NS_PER_S)
    while nanos / NS_PER_S < when:
        nanos += 1
    while (nanos - 1) / NS_PER_S >= when:
        nanos -= 1
    return nanos


class Alarm:
    """A plain call at an instant; whatever it raises comes out of ``step``."""

    __slots__ = ("_action", "_env", "callbacks", "daemon")
    _ok = True

    def __init__(self, env: SimEnv, action: Callable[[], None]) -> None:
        self._env = env
        self._action: Callable[[], None] | None = action
        self.callbacks: Any = _RING

    @property
    def label(self) -> str:
        return getattr(self._action, "__qualname__", "alarm")

    def cancel(self) -> None:
        """Without effect once it rang."""
        self._env.cancel(self)
        self._action = None

    def ring(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class Nap:
    """One task asleep: settles its future."""

    __slots__ = ("callbacks", "daemon", "future")
    _ok = True
    label = "nap"

    def __init__(self, future: asyncio.Future) -> None:
        self.future = future
        self.callbacks: Any = _WAKE

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Bell:
    """Wakes the one task that waits for it, for a quarter of what an `asyncio.Event` costs."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.Future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        return self._future


# One tuple for all: a list and a bound method in each entry would cost more than the entry, and make it a cycle.
_RING = (Alarm.ring,)
_WAKE = (Nap.wake,)
