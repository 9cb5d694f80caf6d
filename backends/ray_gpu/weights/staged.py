"""A published version on the trainer's device: the very bytes of the cache's buckets, for engines that take them there.

1. Same rule for what goes into which bucket, same offsets, same padding as `writer`: so the manifest of the published
   version describes this copy too, and a receiver needs no other.
2. Buckets are memory of their own, never the model's: the trainer may offload, or train on, without regard to them.
3. A digest says whether a receiver sees what was staged. It is a sum on the device, in place of a checksum that would
   have every byte copied to the host; whether the *load* was right, `--verify-weights` asks of every tensor.
"""

from collections.abc import Callable, Sequence

import torch

from backends.ray_gpu.weights.manifest import Bucket, Manifest
from backends.ray_gpu.weights.writer import ALIGNMENT
from core.errors import InvariantBroken, OutOfMemory


class Staging:
    """Takes the tensors that a `WeightWriter` takes, in the same order. At most one bucket more than the version is
    held at a time. Where there is no room the copy is given up, and `refusal` says so."""

    def __init__(self, bucket_bytes: int, hold: Callable[[int], None] = lambda nbytes: None) -> None:
        """`hold(nbytes)`: from now on the copy holds so many bytes in all; raises OutOfMemory if it may not."""
        self.refusal = ""
        self._limit = bucket_bytes
        self._hold = hold
        self._held = 0
        self._parts: list[torch.Tensor] = []
        self._size = 0
        self._buckets: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        if self.refusal:
            return
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        offset = -(-self._size // ALIGNMENT) * ALIGNMENT
        if self._parts and offset + part.numel() > self._limit:
            self._close_bucket()
            offset = 0
        if offset > self._size:
            self._parts.append(part.new_zeros(offset - self._size))
        self._parts.append(part)
        self._size = offset + part.numel()

    def finish(self, manifest: Manifest) -> tuple[torch.Tensor, ...]:
        """The buckets, in the order of the manifest's; none if there was no room."""
        if self._parts and not self.refusal:
            self._close_bucket()
        if self.refusal:
            return ()
        sizes = [bucket.numel() for bucket in self._buckets]
        if sizes != [bucket.nbytes for bucket in manifest.buckets]:
            raise InvariantBroken(f"staged buckets of {sizes} bytes are not those of {manifest}")
        return tuple(self._buckets)

    def _close_bucket(self) -> None:
        try:
            self._hold(self._held + self._size)
            # A copy also of a single part: that would be the model's own memory.
            whole = torch.empty(self._size, dtype=torch.uint8, device=self._parts[0].device)
            self._buckets.append(torch.cat(self._parts, out=whole))
            self._held += self._size
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            self.refusal = f"the trainer has no room for a copy to lend: {str(error).splitlines()[0]}"
            self._buckets = []
            self._hold(0)
        self._parts, self._size = [], 0


def digest(buckets: Sequence[torch.Tensor]) -> int:
    """Sum of the bytes, eight at a time, modulo 2**64: the same on every device."""
    found = 0
    for bucket in buckets:
        whole = bucket.numel() // 8 * 8
        sums = [bucket[:whole].view(torch.int64).sum(), bucket[whole:].sum(dtype=torch.int64)]
        found += sum(int(one) for one in sums)
    return found % 2**64


def tensors(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of one bucket, on its device, without a copy."""
    return [
        (
            entry.name,
            flat[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape),
        )
        for entry in bucket.tensors
    ]
