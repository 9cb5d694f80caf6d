"""What waits for one driver to fetch it, in order and numbered.

A fetch names the number up to which everything arrived before; that is forgotten. A fetch whose answer was lost is
simply asked again. Lines of the event log that follow each other travel as one frame.
"""

import asyncio
from collections import deque

from backends.ray_gpu import wire

FETCH_MOST = 2_000
"""Items in one answer."""


class Outbox:
    def __init__(self) -> None:
        self._items: deque[bytes | wire.Frame] = deque()
        self._first = 0
        """Number of the oldest item."""
        self._more = asyncio.Event()

    def line(self, line: bytes) -> None:
        """A line of the event log."""
        self._put(line)

    def frame(self, frame: wire.Frame) -> None:
        self._put(frame)

    def _put(self, item: bytes | wire.Frame) -> None:
        self._items.append(item)
        self._more.set()

    async def fetch(self, after: int, wait_s: float) -> tuple[int, list[bytes]]:
        """Forget everything before number `after`; what comes next, packed, and the number to say the next time. Waits
        up to `wait_s` for something to be there."""
        while self._first < after and self._items:
            self._items.popleft()
            self._first += 1
        if not self._items:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), wait_s)
            except TimeoutError:
                return after, []
        items = [item for item, _ in zip(self._items, range(FETCH_MOST), strict=False)]
        return self._first + len(items), _packed(items)


def _packed(items: list[bytes | wire.Frame]) -> list[bytes]:
    frames: list[bytes] = []
    lines: list[bytes] = []
    for item in items:
        if isinstance(item, bytes):
            lines.append(item)
            continue
        if lines:
            frames.append(wire.pack(wire.Entries(lines=b"".join(lines))))
            lines = []
        frames.append(wire.pack(item))
    if lines:
        frames.append(wire.pack(wire.Entries(lines=b"".join(lines))))
    return frames
