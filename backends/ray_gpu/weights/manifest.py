"""What one published version consists of: which bytes of which shared-memory file are which tensor.

Plain records, so that they can cross processes and be read without torch. A manifest names files of one node; a copy
on another node has its own (`transfer`). Names are the parameter names of the Hugging Face model, tensors whole (not
sharded).
"""

import msgspec

from core.model import Record


class TensorEntry(Record, frozen=True, kw_only=True):
    name: str
    dtype: str
    """As torch calls it, without the module: `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the bucket."""
    nbytes: int


class Bucket(Record, frozen=True, kw_only=True):
    file: str
    """Path of the shared-memory file."""
    nbytes: int
    """Of the whole file, padding between tensors included."""
    checksum: int
    """`weights.checksum` of the whole file."""
    tensors: tuple[TensorEntry, ...]


class Manifest(Record, frozen=True, kw_only=True):
    pipeline: str
    version: int
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the version takes on one node."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for bucket in self.buckets for tensor in bucket.tensors)

    def __str__(self) -> str:
        return f"version {self.version} of {self.pipeline}"


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Raises `msgspec.DecodeError` (which covers a validation error) for anything that is not a manifest."""
    return msgspec.json.decode(data, type=Manifest)
