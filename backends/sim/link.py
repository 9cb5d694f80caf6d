"""Moving weights: the links that transfers share, and the cache of published versions in host memory.

Rules of this room:

1. A declared cost (publish, sync) is what one transfer takes alone. With the bytes it moves that makes a rate, and the
   rate is taken out of the bandwidth of every link on the way for as long as the transfer runs; what does not fit
   queues, first come, first served. A transfer declared faster than its link takes as long as the link needs.
2. Links are taken in ascending order of node, so that two transfers never wait for each other.
3. The cache keeps the latest version and those being read. The version just superseded stays until the next publish
   begins (or nobody could sync to what was the latest a moment ago); the peak is the same two versions that a publish
   needs in any case.
4. A version exists once its transfer is complete, not before.

Default bandwidth: each GPU copies 23.5 GiB/s from pinned host memory (`copy_gib_per_s.pinned_in` of the collected
measurements; 24.4 outwards, taken as equal), over its own lanes, so a node's link has that times its GPUs.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from backends.sim.calendar import SimEnv
from backends.sim.memory import Device, Kind, Memory
from core.units import NS_PER_S, gib

PINNED_COPY_PER_GPU = gib(23.5)
"""Bytes a second between one GPU and pinned host memory."""
TRANSFER_BUCKET = gib(0.5)
"""Largest staging buffer of a sync on each GPU. It lives in the cluster's memory margin."""

Steps = Generator[simpy.Event, Any, Any]


class Link:
    """The path between the GPUs of one node and its host memory."""

    def __init__(self, env: SimEnv, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._free = simpy.Container(env, capacity=bytes_per_s, init=bytes_per_s)

    def take(self, rate: int) -> Steps:
        """Wait for `rate` bytes a second of the bandwidth."""
        share = self._free.get(rate)
        if share.triggered:
            return
        try:
            yield share
        except simpy.Interrupt:
            if share.triggered:
                self.give(rate)
            else:
                share.cancel()
            raise

    def give(self, rate: int) -> None:
        self._free.put(rate)


def transfer(links: Sequence[Link], size: int, alone: int, work: Callable[[int], Steps]) -> Steps:
    """Move `size` bytes over each of `links`, which takes `alone` ns undisturbed; `work(ns)` lets time pass."""
    narrowest = min(link.bytes_per_s for link in links)
    duration = max(alone, -(-size * NS_PER_S // narrowest))
    rate = min(size * NS_PER_S // duration, narrowest) if duration else 0
    taken: list[Link] = []
    try:
        if rate:
            for link in links:
                yield from link.take(rate)
                taken.append(link)
        yield from work(duration)
    finally:
        for link in taken:
            link.give(rate)


class WeightCache:
    """The published versions of one pipeline, in the host memory of every node it uses."""

    def __init__(self, memory: Memory, pipeline: str, hosts: Sequence[Device], size: int) -> None:
        self._memory = memory
        self._owner = f"{pipeline}/weight_cache"
        self._hosts = tuple(hosts)
        self._readers: dict[int, int] = {}  # by version that is here, how many read it now
        self.size = size
        """Bytes of one version on each node."""
        self.latest = -1

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._readers)

    def begin(self) -> None:
        """Make room for one more version. Raises `OutOfMemory`."""
        for version in self.versions:
            if version != self.latest and not self._readers[version]:
                self._evict(version)
        self._memory.take(self._owner, self._present(), ((Kind.CACHE, self.size),))

    def complete(self, version: int) -> None:
        """The room made is now `version`. One that was here already is replaced."""
        if version in self._readers:
            self.give_up()
        self._readers.setdefault(version, 0)
        self.latest = max(self.latest, version)

    def give_up(self) -> None:
        """The room made is not needed after all."""
        self._memory.drop(self._owner, self._present(), Kind.CACHE, self.size)

    def start_reading(self, version: int) -> str | None:
        """Why it cannot be read; None: it can, and stays until `stop_reading`."""
        if version not in self._readers:
            return f"version {version} is not in the weight cache (latest: {self.latest})"
        self._readers[version] += 1
        return None

    def stop_reading(self, version: int) -> None:
        if version in self._readers:
            self._readers[version] -= 1

    def clear(self) -> None:
        self._readers.clear()
        self.latest = -1
        self._memory.drop(self._owner, self._present(), Kind.CACHE)

    def _evict(self, version: int) -> None:
        del self._readers[version]
        self.give_up()

    def _present(self) -> tuple[Device, ...]:
        return tuple(host for host in self._hosts if not host.gone)
