"""Weights between a Hugging Face folder and the Megatron model, both ways, one tensor at a time.

1. Loading reads from the folder's safetensors files only what this rank's parameters are made of.
2. Exporting is collective: every rank goes through the same entries in the same order, and the full tensors, named
   as in the folder, arrive on rank 0 alone. Data-parallel replicas beyond the first have nothing to send.
3. Every parameter of the model is loaded exactly once, or the load fails.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backends.ray_gpu.training.architecture import Architecture
from backends.ray_gpu.training.layout import Entry, cut, entries, join, piece_shape
from backends.ray_gpu.training.model import Policy
from backends.ray_gpu.training.parallel import Place
from core.errors import ConfigError, InvariantBroken

TIED_COPY = "output_layer.weight"


class HfFolder:
    """The tensors of a Hugging Face folder by name. Files are memory-mapped; nothing is read before it is asked for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files = _index(Path(folder))
        self._open: dict[str, safe_open] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The full tensor, on the CPU; `ConfigError` if it is missing or has another shape."""
        file = self._files.get(name)
        if file is None:
            raise ConfigError(self.folder, f"no tensor {name}", "the weights do not fit config.json")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(file, f"not readable as safetensors: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ConfigError(file, f"{name} has the shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor


def _index(folder: Path) -> dict[str, str]:
    """File of each tensor."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: str(folder / file) for name, file in weights.items()}
    if not single.exists():
        raise ConfigError(str(folder), "no model.safetensors", "convert the weights to safetensors")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), str(single))
    except (OSError, SafetensorError) as error:
        raise ConfigError(str(single), f"not readable as safetensors: {error}") from error


def load(model: Policy, arch: Architecture, place: Place, folder: str) -> None:
    """Fill every parameter of this rank's part of the model from the folder, cast to the model's dtype."""
    source = HfFolder(folder)
    own = dict(model.named_parameters())
    for entry in entries(arch):
        name = _local_name(model, entry)
        names = [name] if name in own else []
        if entry.kind == "vocab" and arch.tied and TIED_COPY in own:
            names.append(TIED_COPY)
        if not names:
            continue
        tensors = [source.tensor(hf, shape) for hf, shape in zip(entry.hf, entry.shapes, strict=True)]
        piece = cut(entry, tensors, arch, place.tp_rank, place.tp)
        for each in names:
            own.pop(each).data.copy_(piece)
    if own:
        raise InvariantBroken(f"no weights for {', '.join(sorted(own))} of {arch.name}")


def export(model: Policy, arch: Architecture, place: Place, *, on_device: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full CPU tensor) in the model's dtype, on rank 0; nothing on other ranks. `on_device`: where
    the model is instead, and some may be the model's own memory.

    Collective: every rank must exhaust its iterator.
    """
    own = dict(model.named_parameters())
    for entry in entries(arch):
        if place.dp_rank > 0:
            continue
        owner = _stage(entry, arch, place)
        piece = own[_local_name(model, entry)].detach() if place.pp_rank == owner else None
        pieces = _collect(piece, entry, arch, place, owner, model.config.params_dtype)
        if pieces is not None:
            for name, tensor in zip(entry.hf, join(entry, pieces, arch), strict=True):
                yield name, tensor.contiguous() if on_device else tensor.contiguous().cpu()


def _stage(entry: Entry, arch: Architecture, place: Place) -> int:
    if entry.layer is None:
        return place.pp - 1 if entry.last else 0
    return entry.layer // (arch.layers // place.pp)


def _local_name(model: Policy, entry: Entry) -> str:
    """The parameter's name on this stage; a layer of another stage gives a name that no parameter has."""
    if entry.layer is None:
        return entry.megatron
    first = model.decoder.layers[0].layer_number - 1
    return entry.megatron.format(layer=entry.layer - first)


def _collect(
    piece: Tensor | None, entry: Entry, arch: Architecture, place: Place, owner: int, dtype: torch.dtype
) -> list[Tensor] | None:
    """The pieces of all tensor-parallel ranks, on global rank 0; None elsewhere.

    Gathered within the owning stage, then sent along the pipeline group of tensor-parallel rank 0, to which
    global rank 0 belongs.
    """
    pieces = None
    if piece is not None:
        pieces = [piece]
        if place.tp > 1 and entry.kind != "same":
            pieces = [torch.empty_like(piece) for _ in range(place.tp)]
            dist.all_gather(pieces, piece.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if place.tp_rank > 0:
        return None
    if owner > 0:
        pieces = _hand_to_first_stage(pieces, entry, arch, place, owner, dtype)
    return pieces if place.pp_rank == 0 else None


def _hand_to_first_stage(
    pieces: list[Tensor] | None, entry: Entry, arch: Architecture, place: Place, owner: int, dtype: torch.dtype
) -> list[Tensor] | None:
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if pieces is not None:
        dist.send(torch.stack(pieces), ranks[0], group=group)
        return None
    if place.pp_rank > 0:
        return None
    count = 1 if entry.kind == "same" else place.tp
    received = torch.empty(count, *piece_shape(entry, arch, place.tp), dtype=dtype, device=place.device)
    dist.recv(received, ranks[owner], group=group)
    return list(received)
