"""Reading a version: zero-copy tensors over the mapped buckets.

The mapping is private: nothing that is done to a tensor reaches the file, and pages are shared with every other reader
until somebody writes to them. A tensor keeps its mapping alive, also after the version was removed; so copy what is to
stay. Pin a version (`WeightCache.pin`) while it is read, or it may be evicted between two buckets.
"""

import mmap
from collections.abc import Iterator, Mapping

import torch

from backends.ray_gpu.weights.checksum import checksum
from backends.ray_gpu.weights.manifest import Bucket, Manifest, TensorEntry
from backends.ray_gpu.weights.writer import bytes_of, dtype_name, raw
from core.errors import OperationFailed


def read(manifest: Manifest, verify: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in the order they were added. `verify`: check each bucket's checksum before its first tensor.

    Raises OperationFailed naming the file that is gone, cut short or damaged.
    """
    for bucket in manifest.buckets:
        yield from read_bucket(bucket, verify)


def read_bucket(bucket: Bucket, verify: bool = True) -> list[tuple[str, torch.Tensor]]:
    """As `read`, for one bucket."""
    data = _map(bucket)
    if verify and (found := checksum(data)) != bucket.checksum:
        raise OperationFailed(
            f"{bucket.file} is damaged: its checksum is {found:016x}, the manifest says {bucket.checksum:016x}"
        )
    whole = torch.frombuffer(data, dtype=torch.uint8)
    return [(entry.name, _tensor(whole, entry)) for entry in bucket.tensors]


def fingerprint(manifest: Manifest) -> dict[str, int]:
    """Checksum of each tensor, by name: what an engine that loaded the version must report of itself."""
    return {name: checksum(bytes_of(tensor)) for name, tensor in read(manifest, verify=False)}


def compare(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare a version bit by bit with what was loaded from it. Raises OperationFailed naming the first tensor that
    differs or is missing, in the order of the manifest."""
    for name, published in read(manifest, verify=False):
        if name not in tensors:
            raise OperationFailed(f"{name} of {manifest} was not loaded")
        if difference := _difference(published, tensors[name].detach().cpu()):
            raise OperationFailed(f"{name} differs from {manifest}: {difference}")


def _difference(published: torch.Tensor, loaded: torch.Tensor) -> str:
    if (published.dtype, published.shape) != (loaded.dtype, loaded.shape):
        return f"{dtype_name(loaded)} {list(loaded.shape)}, not {dtype_name(published)} {list(published.shape)}"
    # Bits decide, so that a NaN equals itself and 0.0 differs from -0.0.
    ours, theirs = raw(published), raw(loaded)
    if torch.equal(ours, theirs):
        return ""
    differing = (ours != theirs).view(-1, published.element_size()).any(1).nonzero().flatten()
    first = int(differing[0])
    values = f"{loaded.flatten()[first].item()}, not {published.flatten()[first].item()}"
    return f"{len(differing)} of {published.numel()} elements, the first is number {first}: {values}"


def _map(bucket: Bucket) -> mmap.mmap:
    try:
        with open(bucket.file, "rb") as file:
            # A private, writable mapping: torch has no read-only tensors, and this one cannot harm the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise OperationFailed(f"{bucket.file} is gone: the version was removed while it was read") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise OperationFailed(f"{bucket.file} has 0 bytes, the manifest says {bucket.nbytes}") from error
    if len(data) != bucket.nbytes:
        raise OperationFailed(f"{bucket.file} has {len(data)} bytes, the manifest says {bucket.nbytes}")
    return data


def _tensor(whole: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    return whole[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)
