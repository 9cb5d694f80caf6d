"""Tensors leave the device and come back, in place: storages are emptied and refilled, tensors and views stay.

1. Nothing that points at a tensor (an optimizer, a gradient buffer's views, autograd) notices; shapes and strides stay.
2. Content is copied byte for byte, so a run with sleeps equals one without, bit for bit.
3. The host copy lies in slabs that are allocated once and reused: page-locked for CUDA, where allocating is the slow
   part of a first sleep and a copy from ordinary memory is several times slower.
4. On the CPU the "device" is the tensors' own memory, which is really given back; the slabs are host memory.
"""

import gc
from collections.abc import Iterable

import torch
from megatron.core import parallel_state
from torch import Tensor, UntypedStorage

SLAB_BYTES = 64 << 20
"""A power of two, for torch's page-locked allocator rounds up to one."""


class Parking:
    """A fixed set of device tensors that are either loaded or parked on the host.

    `kept` tensors get their content back. With `frozen` they never change after the first parking, so later ones copy
    nothing. `scratch` tensors come back as zeros.
    """

    def __init__(
        self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = (), *, cuda: bool, frozen: bool = False
    ) -> None:
        self._kept = _storages(kept)
        known = {storage._cdata for storage in self._kept}
        self._scratch = [storage for storage in _storages(scratch) if storage._cdata not in known]
        self._kept_bytes = [storage.nbytes() for storage in self._kept]
        self._scratch_bytes = [storage.nbytes() for storage in self._scratch]
        self._cuda = cuda
        self._frozen = frozen
        self._slabs: list[Tensor] = []
        self.loaded = True

    @property
    def nbytes(self) -> int:
        """What the tensors need on the device when loaded."""
        return sum(self._kept_bytes) + sum(self._scratch_bytes)

    @property
    def resident_bytes(self) -> int:
        """What they hold on the device now, by their storages."""
        return sum(storage.nbytes() for storage in (*self._kept, *self._scratch))

    @property
    def host_bytes(self) -> int:
        """What the slabs hold on the host, loaded or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def park(self) -> None:
        """Free the device memory; a no-op when parked."""
        if not self.loaded:
            return
        if not (self._frozen and self._slabs):
            self._allocate_slabs()
            self._copy(to_host=True)
        for storage in (*self._kept, *self._scratch):
            storage.resize_(0)
        self.loaded = False

    def load(self) -> None:
        """Bring everything back; a no-op when loaded."""
        if self.loaded:
            return
        for storage, size in zip(self._kept, self._kept_bytes, strict=True):
            storage.resize_(size)
        self._copy(to_host=False)
        for storage, size in zip(self._scratch, self._scratch_bytes, strict=True):
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self.loaded = True

    def _allocate_slabs(self) -> None:
        if self._slabs:
            return
        missing = sum(self._kept_bytes)
        while missing > 0:
            size = min(SLAB_BYTES, missing)
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda))
            missing -= size

    def _copy(self, *, to_host: bool) -> None:
        """All kept storages one after another through the slabs; a storage may span several."""
        slab, offset = 0, 0
        for storage in self._kept:
            device, start = _bytes_of(storage), 0
            while start < device.numel():
                length = min(device.numel() - start, self._slabs[slab].numel() - offset)
                on_device = device[start : start + length]
                on_host = self._slabs[slab][offset : offset + length]
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)
                start, offset = start + length, offset + length
                if offset == self._slabs[slab].numel():
                    slab, offset = slab + 1, 0
        if self._cuda:
            torch.cuda.synchronize()


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages below the tensors, each once, in order; empty ones left out."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def drop_caches() -> None:
    """Give back what torch and Megatron keep on the CUDA device for the next step.

    Each of these can pin a whole segment of device memory: cuBLAS workspaces of the forward and the backward thread,
    Megatron's buffer of gathered activations, and whatever only a reference cycle still holds.
    """
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    parallel_state.get_global_memory_buffer().buffer.clear()
    torch.cuda.empty_cache()
