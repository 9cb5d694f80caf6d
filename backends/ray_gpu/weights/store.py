"""How versions lie on disk (normally in /dev/shm), and who may touch them. No torch here.

    DIRECTORY/PIPELINE/v3/              a version: complete, because it has this name
              PIPELINE/v3/manifest.json
              PIPELINE/v3/0.bucket ...
              PIPELINE/v4.part/         somebody is writing it, or died doing so

Rules of this room:

1. A version appears by one rename of its folder, all its files already in it. What a killed writer leaves is a `.part`.
2. Every lock is a `flock` on a folder: the kernel ends it with the process that has it, however that dies. (A process
   forked meanwhile has it too, until it ends or the lock is given back.)
3. On a version's folder: shared while somebody reads it, exclusive to remove it. On a `.part`: exclusive while it is
   written; one that can be locked has no writer, and may be removed or taken over.
4. On the pipeline's folder: exclusive while versions come, go or get locked; never while bytes are copied.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from backends.ray_gpu.weights import manifest as manifests
from backends.ray_gpu.weights.manifest import Manifest
from core.errors import InvariantBroken, OperationFailed, OutOfMemory

MANIFEST = "manifest.json"
PART = ".part"


class Store:
    """The folder of one pipeline. Holds nothing open."""

    def __init__(self, directory: str | Path, pipeline: str) -> None:
        self.pipeline = pipeline
        # An id may hold anything; quoted, it is one name, and no two ids share it.
        self.folder = Path(directory) / quote(pipeline, safe="").replace(".", "%2E")

    def version(self, version: int) -> Path:
        if version < 0:
            raise InvariantBroken(f"version {version} of {self.pipeline} cannot be published")
        return self.folder / f"v{version}"

    def part(self, version: int) -> Path:
        return self.version(version).with_suffix(PART)

    def versions(self) -> tuple[int, ...]:
        """Those that are complete, ascending."""
        names = (re.fullmatch(r"v(\d+)", file.name) for file in _entries(self.folder))
        return tuple(sorted(int(name[1]) for name in names if name))

    def load(self, version: int) -> Manifest:
        """Raises OperationFailed if there is no such version, or its manifest cannot be read."""
        file = self.version(version) / MANIFEST
        try:
            return manifests.decode(file.read_bytes())
        except FileNotFoundError as error:
            raise self.absent(version) from error
        except msgspec.DecodeError as error:
            raise OperationFailed(f"{file} is damaged: {error}") from error

    def absent(self, version: int) -> OperationFailed:
        there = ", ".join(map(str, self.versions())) or "none"
        return OperationFailed(f"version {version} of {self.pipeline} is not in the weight cache; there: {there}")

    def nbytes(self) -> int:
        """Of every file, unfinished versions included; what goes while it is counted counts for nothing."""
        total = 0
        for version in _entries(self.folder):
            for file in _entries(version):
                with suppress(FileNotFoundError):
                    total += file.stat().st_size
        return total

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes which versions there are. Makes the folder if need be."""
        lock = None
        while lock is None:  # at most once more for each `drop` that gets in between
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(self.folder, fcntl.LOCK_EX)
        try:
            yield
        finally:
            unlock(lock)

    def sweep(self) -> None:
        """Remove what dead writers left. Only while `locked`."""
        for part in _entries(self.folder):
            if part.suffix == PART:
                remove_unused(part)

    def commit(self, manifest: Manifest) -> None:
        """Make the finished part of this version the version. One that is there already is replaced, unless it is read:
        then OperationFailed. `manifest` names the files as they will be called."""
        part, final = self.part(manifest.version), self.version(manifest.version)
        with saving():
            (part / MANIFEST).write_bytes(manifests.encode(manifest))
        with self.locked():
            if final.exists() and not remove_unused(final):
                raise OperationFailed(f"{manifest} is being read, and cannot be published again")
            part.rename(final)


def lock_folder(folder: Path, how: int) -> int | None:
    """A lock on a folder, as a file descriptor for `unlock`; None if the folder is gone, or (with LOCK_NB) in use."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def unlock(lock: int) -> None:
    # Closing would do, but for a child that was forked meanwhile.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def remove_unused(folder: Path) -> bool:
    """Remove a version or part that nobody has locked; whether it is gone. Only while the store is `locked`."""
    lock = lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return not folder.exists()
    shutil.rmtree(folder)
    unlock(lock)
    return True


@contextmanager
def saving() -> Iterator[None]:
    """Around writing into the store: a full file system is a host out of memory."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise OutOfMemory(f"no room for weights in the cache: {error}") from error
        raise


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, by name; empty if it is gone or no folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def held_by_pipeline(directory: str | Path) -> dict[str, int]:
    """Bytes that the versions of each pipeline take under a directory."""
    names = [unquote(folder.name) for folder in _entries(Path(directory))]
    return {name: Store(directory, name).nbytes() for name in names}
