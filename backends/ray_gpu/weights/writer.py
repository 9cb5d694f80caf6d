"""Publishing a version: tensors go in one by one, a manifest comes out.

A bucket is a file that is written once, in order: bytes of tensors, each at a multiple of `ALIGNMENT`. `add` copies at
once, so the caller may reuse the tensor's memory; nothing of the version is held here but one tensor's bytes.
"""

import ctypes
import fcntl
import os
from types import TracebackType
from typing import BinaryIO

import torch

from backends.ray_gpu.weights.checksum import Checksum
from backends.ray_gpu.weights.manifest import Bucket, Manifest, TensorEntry
from backends.ray_gpu.weights.store import Store, lock_folder, saving, unlock
from core.errors import InvariantBroken, OperationFailed

ALIGNMENT = 64
"""Bytes: a cache line, and what the widest vector loads of a CPU want."""


class WeightWriter:
    """Writes one version of one pipeline into the cache under `directory`.

    A bucket has at most `bucket_bytes`, unless a single tensor is larger: that one gets a bucket for itself. Used as a
    context manager, leaving it without `commit` removes everything written. Raises OperationFailed if somebody else is
    writing this version, OutOfMemory when the file system is full.
    """

    def __init__(self, directory: str | os.PathLike[str], pipeline: str, version: int, bucket_bytes: int) -> None:
        self._store = Store(directory, pipeline)
        self._version = version
        self._limit = bucket_bytes
        self._names: set[str] = set()
        self._done: list[Bucket] = []
        self._open: _OpenBucket | None = None
        self._part = self._store.part(version)
        with self._store.locked(), saving():
            self._store.sweep()
            if self._part.exists():
                raise OperationFailed(f"version {version} of {pipeline} is being written by another process")
            self._part.mkdir()
            self._lock = lock_folder(self._part, fcntl.LOCK_EX)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a whole tensor (any shape, dtype, device) into the version."""
        if name in self._names:
            raise InvariantBroken(f"{name} was added to version {self._version} twice")
        self._names.add(name)
        data = bytes_of(tensor)
        with saving():
            if self._open is not None and self._open.size_with(data.nbytes) > self._limit:
                self._close_bucket()
            if self._open is None:
                self._open = _OpenBucket(str(self._part / f"{len(self._done)}.bucket"))
            self._open.add(name, tensor, data)

    def commit(self) -> Manifest:
        """The version is there from now on, all at once."""
        with saving():
            self._close_bucket()
        manifest = Manifest(pipeline=self._store.pipeline, version=self._version, buckets=tuple(self._done))
        self._store.commit(manifest)
        self._give_up_lock()
        return manifest

    def close(self) -> None:
        """Remove what was written, unless it was committed. Also twice."""
        if self._open is not None:
            self._open.abandon()
            self._open = None
        if self._lock is None:
            return
        self._give_up_lock()
        with self._store.locked():
            self._store.sweep()

    def __enter__(self) -> "WeightWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _close_bucket(self) -> None:
        if self._open is None:
            return
        bucket = self._open.finish(str(self._store.version(self._version) / f"{len(self._done)}.bucket"))
        self._done.append(bucket)
        self._open = None

    def _give_up_lock(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None


class _OpenBucket:
    """A bucket in the making."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - closed by finish or abandon
        self._checksum = Checksum()
        self._size = 0
        self._tensors: list[TensorEntry] = []

    def size_with(self, nbytes: int) -> int:
        return _aligned(self._size) + nbytes

    def add(self, name: str, tensor: torch.Tensor, data: memoryview) -> None:
        offset = _aligned(self._size)
        self._write(memoryview(bytes(offset - self._size)))
        self._write(data)
        self._tensors.append(
            TensorEntry(
                name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), offset=offset, nbytes=data.nbytes
            )
        )

    def finish(self, final: str) -> Bucket:
        """Complete; `final` is the path it will have once its folder is renamed."""
        self._file.close()
        return Bucket(file=final, nbytes=self._size, checksum=self._checksum.value, tensors=tuple(self._tensors))

    def abandon(self) -> None:
        # A second attempt to flush what did not fit must not hide the first one's error.
        try:
            self._file.close()
        except OSError:
            self._file.raw.close()

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self._checksum.add(data)
        self._size += data.nbytes


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in host memory, row by row, as uint8; no copy of one that lies so already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """As `raw`, for what wants a buffer.

    Not through numpy: a storage that numpy has seen can never be emptied again, and trainers empty theirs to sleep.
    """
    flat = raw(tensor)
    buffer = (ctypes.c_uint8 * flat.numel()).from_address(flat.data_ptr() if flat.numel() else 0)
    buffer.owner = flat  # type: ignore[attr-defined]  # the view keeps the buffer alive, the buffer the tensor
    return memoryview(buffer).cast("B")


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
