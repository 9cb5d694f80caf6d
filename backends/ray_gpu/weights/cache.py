"""The versions of one pipeline on one node: which there are, who reads them, what goes. No torch here.

Policy: the latest version stays, and those being read; everything else goes with the next `evict`. A pipeline has room
for `keep` versions (staleness + 2): when readers hold that many, there is no room for the next one until one of them is
done.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from backends.ray_gpu.weights.manifest import Manifest
from backends.ray_gpu.weights.store import Store, lock_folder, remove_unused, unlock
from core.errors import InvariantBroken, OperationFailed, OutOfMemory


class WeightCache:
    """The cache of `pipeline` under `directory`. Every process of the node opens its own; pins end with the process."""

    def __init__(self, directory: str | os.PathLike[str], pipeline: str, keep: int) -> None:
        if keep < 2:
            raise InvariantBroken(f"keep={keep}: a version cannot be replaced without room for two")
        self._store = Store(directory, pipeline)
        self._keep = keep
        self._pins: dict[int, list[int]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Complete ones, ascending."""
        return self._store.versions()

    @property
    def latest(self) -> int:
        """-1: none."""
        return max(self.versions, default=-1)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory on this node, unfinished versions included."""
        return self._store.nbytes()

    def find(self, version: int) -> Manifest:
        """Raises OperationFailed if it is not there."""
        return self._store.load(version)

    def pin(self, version: int) -> Manifest:
        """Keep a version until `unpin`, or until this process ends. Pins of one version add up.

        Raises OperationFailed if it is not there.
        """
        with self._store.locked():
            lock = lock_folder(self._store.version(version), fcntl.LOCK_SH)
            if lock is None:
                raise self._store.absent(version)
        try:
            manifest = self._store.load(version)
        except OperationFailed:
            unlock(lock)
            raise
        self._pins.setdefault(version, []).append(lock)
        return manifest

    def unpin(self, version: int) -> None:
        """Take one pin of this process back."""
        if not self._pins.get(version):
            raise InvariantBroken(f"version {version} of {self._store.pipeline} is not pinned here")
        unlock(self._pins[version].pop())

    @contextmanager
    def reading(self, version: int) -> Iterator[Manifest]:
        """`pin` and `unpin` around a block."""
        manifest = self.pin(version)
        try:
            yield manifest
        finally:
            self.unpin(version)

    def evict(self) -> tuple[int, ...]:
        """Remove all versions but the latest and those being read, by whatever process; returns which."""
        with self._store.locked():
            *older, _ = self.versions or (-1,)
            return tuple(version for version in older if remove_unused(self._store.version(version)))

    def make_room(self) -> None:
        """To be called before a version is published: evicts, and raises OutOfMemory if one more would be too many."""
        self.evict()
        there = self.versions
        if len(there) >= self._keep:
            listed = ", ".join(map(str, there))
            raise OutOfMemory(
                f"the weight cache of {self._store.pipeline} keeps at most {self._keep} versions, and {listed} are all "
                "still being read"
            )

    def drop(self) -> None:
        """Remove everything, read or not; who has a version mapped keeps its memory until the mapping ends."""
        for version in list(self._pins):
            while self._pins[version]:
                self.unpin(version)
        with self._store.locked():
            shutil.rmtree(self._store.folder)
