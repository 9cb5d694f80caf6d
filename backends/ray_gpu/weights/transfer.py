"""A copy of a version on another node, bucket by bucket. No torch here; how the bytes travel is the caller's business.

    receiver = Receiver(directory, manifest)          # there
    for index in receiver.missing:
        receiver.receive(index, send(manifest, index))    # `send` runs here
    manifest_there = receiver.commit()

What has arrived stays when the receiver dies: the next one for the same version (same checksums) goes on from there.
What nobody goes on with is removed by the next writer or receiver of another version, or by `drop`.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec

from backends.ray_gpu.weights import manifest as manifests
from backends.ray_gpu.weights.checksum import checksum
from backends.ray_gpu.weights.manifest import Bucket, Manifest
from backends.ray_gpu.weights.store import Store, lock_folder, saving, unlock
from core.errors import InvariantBroken, OperationFailed

ANNOUNCED = "announced.json"


def send(manifest: Manifest, index: int) -> bytes:
    """The bytes of one bucket, checked. Raises OperationFailed if the file is gone or damaged."""
    bucket = manifest.buckets[index]
    try:
        data = Path(bucket.file).read_bytes()
    except FileNotFoundError as error:
        raise OperationFailed(f"{bucket.file} is gone: the version was removed while it was sent") from error
    if reason := _wrong(data, bucket):
        raise OperationFailed(f"{bucket.file} is damaged: {reason}")
    return data


class Receiver:
    """Builds a copy of `manifest` (the sender's) under `directory` of this node.

    Raises OperationFailed if another process is building the same version.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest) -> None:
        self._store = Store(directory, manifest.pipeline)
        self._folder = self._store.part(manifest.version)
        final = self._store.version(manifest.version)
        self.manifest = msgspec.structs.replace(
            manifest,
            buckets=tuple(
                msgspec.structs.replace(bucket, file=str(final / f"{index}.bucket"))
                for index, bucket in enumerate(manifest.buckets)
            ),
        )
        """The manifest of this node's copy."""
        self._lock: int | None = None
        with self._store.locked(), saving():
            self._claim()
        self._there = {index for index, bucket in enumerate(self.manifest.buckets) if self._arrived(index, bucket)}

    @property
    def missing(self) -> tuple[int, ...]:
        """Buckets that have not arrived yet."""
        return tuple(index for index in range(len(self.manifest.buckets)) if index not in self._there)

    def receive(self, index: int, data: bytes) -> None:
        """Take one bucket in. Raises OperationFailed if it arrived damaged; send it again then."""
        if reason := _wrong(data, self.manifest.buckets[index]):
            raise OperationFailed(f"bucket {index} of {self.manifest} arrived damaged: {reason}")
        with saving():
            half = self._file(index).with_suffix(".half")
            half.write_bytes(data)
            half.rename(self._file(index))
        self._there.add(index)

    def commit(self) -> Manifest:
        """The copy is there from now on, all at once."""
        if self.missing:
            raise InvariantBroken(f"buckets {self.missing} of {self.manifest} have not arrived")
        (self._folder / ANNOUNCED).unlink()
        self._store.commit(self.manifest)
        self.close()
        return self.manifest

    def close(self) -> None:
        """Stop; what has arrived stays for the next receiver. Also twice."""
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _claim(self) -> None:
        """Take over what a dead receiver of the same version left, or begin anew."""
        announced = manifests.encode(self.manifest)
        lock = lock_folder(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None and self._folder.exists():
            raise OperationFailed(f"{self.manifest} is being copied by another process")
        if lock is not None and _content(self._folder / ANNOUNCED) != announced:
            unlock(lock)
            lock = None
        self._store.sweep()
        if lock is None:
            self._folder.mkdir()
            (self._folder / ANNOUNCED).write_bytes(announced)
            lock = lock_folder(self._folder, fcntl.LOCK_EX)
        self._lock = lock

    def _arrived(self, index: int, bucket: Bucket) -> bool:
        data = _content(self._file(index))
        return data is not None and not _wrong(data, bucket)

    def _file(self, index: int) -> Path:
        return self._folder / f"{index}.bucket"


def _wrong(data: bytes, bucket: Bucket) -> str:
    """What is wrong with a bucket's bytes; empty if nothing."""
    if len(data) != bucket.nbytes:
        return f"{len(data)} bytes, the manifest says {bucket.nbytes}"
    found = checksum(data)
    return "" if found == bucket.checksum else f"checksum {found:016x}, the manifest says {bucket.checksum:016x}"


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
