"""Where each Hugging Face tensor lies in Megatron's model: one table, and how each kind of entry is cut and joined.

1. Pure functions on CPU or device tensors: no model, no process group, no file.
2. `cut` and `join` are inverses: joining all ranks' pieces gives back every bit of the Hugging Face tensors.
3. One entry is one Megatron parameter. The biggest thing ever held is one entry, which is what makes conversion
   streaming.

Megatron's own layouts that differ from Hugging Face's:
- QKV is one matrix, grouped by key/value head: that group's queries, its key, its value; a rank has whole groups.
- fc1 is gate and up in one; each rank has its own rows of gate followed by its own rows of up.
- Embedding and output rows are padded so that every rank has as many.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from backends.ray_gpu.training.architecture import Architecture

Kind = Literal["same", "columns", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    megatron: str
    """Parameter name; `{layer}` in it stands for the layer's index within its pipeline stage."""
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Full shape of each tensor in `hf`."""
    kind: Kind
    layer: int | None = None
    """Global layer index; None outside the layers."""
    last: bool = False
    """Outside the layers: on the last pipeline stage, not on the first."""


def entries(arch: Architecture) -> Iterator[Entry]:
    """Every parameter of the model, from the embedding to the output layer."""
    table = (arch.vocab, arch.hidden)
    yield Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (table,), "vocab")
    for layer in range(arch.layers):
        yield from _layer_entries(arch, layer)
    norm = (arch.hidden,)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), (norm,), "same", last=True)
    if not arch.tied:
        yield Entry("output_layer.weight", ("lm_head.weight",), (table,), "vocab", last=True)


def _layer_entries(arch: Architecture, layer: int) -> Iterator[Entry]:
    ours, theirs = "decoder.layers.{layer}.", f"model.layers.{layer}."
    q, kv, hidden = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.hidden

    def entry(megatron: str, kind: Kind, *hf: tuple[str, tuple[int, ...]]) -> Entry:
        names, shapes = tuple(theirs + name for name, _ in hf), tuple(shape for _, shape in hf)
        return Entry(ours + megatron, names, shapes, kind, layer)

    yield entry("input_layernorm.weight", "same", ("input_layernorm.weight", (hidden,)))
    projections = [(f"self_attn.{name}_proj", rows) for name, rows in (("q", q), ("k", kv), ("v", kv))]
    qkv = "self_attention.linear_qkv."
    yield entry(qkv + "weight", "qkv", *((name + ".weight", (rows, hidden)) for name, rows in projections))
    if arch.qkv_bias:
        yield entry(qkv + "bias", "qkv", *((name + ".bias", (rows,)) for name, rows in projections))
    if arch.qk_norm:
        for name in ("q", "k"):
            theirs_name = f"self_attn.{name}_norm.weight"
            yield entry(f"self_attention.{name}_layernorm.weight", "same", (theirs_name, (arch.head_dim,)))
    yield entry("self_attention.linear_proj.weight", "columns", ("self_attn.o_proj.weight", (hidden, q)))
    yield entry("pre_mlp_layernorm.weight", "same", ("post_attention_layernorm.weight", (hidden,)))
    gate_up = [(f"mlp.{name}_proj.weight", (arch.ffn, hidden)) for name in ("gate", "up")]
    yield entry("mlp.linear_fc1.weight", "gate_up", *gate_up)
    yield entry("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight", (hidden, arch.ffn)))


def cut(entry: Entry, tensors: Sequence[Tensor], arch: Architecture, rank: int, tp: int) -> Tensor:
    """The piece of tensor-parallel rank `rank` of `tp`, from the full tensors of `entry.hf` in order."""
    match entry.kind:
        case "same":
            return tensors[0]
        case "columns":
            return tensors[0].chunk(tp, 1)[rank]
        case "vocab":
            return _pad_rows(tensors[0], arch.padded_vocab(tp)).chunk(tp, 0)[rank]
        case "gate_up":
            return torch.cat([tensor.chunk(tp, 0)[rank] for tensor in tensors])
        case "qkv":
            groups = [_by_group(tensor, arch).chunk(tp, 0)[rank] for tensor in tensors]
            return torch.cat(groups, 1).flatten(0, 1)


def join(entry: Entry, pieces: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    """The full tensors of `entry.hf`, from the pieces of all tensor-parallel ranks in order."""
    match entry.kind:
        case "same":
            return [pieces[0]]
        case "columns":
            return [torch.cat(list(pieces), 1)]
        case "vocab":
            return [torch.cat(list(pieces))[: arch.vocab]]
        case "gate_up":
            halves = [piece.chunk(2, 0) for piece in pieces]
            return [torch.cat([half[part] for half in halves]) for part in (0, 1)]
        case "qkv":
            return _split_groups(torch.cat(list(pieces)), arch)


def piece_shape(entry: Entry, arch: Architecture, tp: int) -> tuple[int, ...]:
    """Shape of what `cut` returns, the same on every tensor-parallel rank."""
    first = entry.shapes[0]
    match entry.kind:
        case "same":
            return first
        case "columns":
            return (first[0], first[1] // tp)
        case "vocab":
            return (arch.padded_vocab(tp) // tp, first[1])
        case _:
            return (sum(shape[0] for shape in entry.shapes) // tp, *first[1:])


def _pad_rows(table: Tensor, rows: int) -> Tensor:
    missing = rows - table.shape[0]
    return torch.cat([table, table.new_zeros(missing, *table.shape[1:])]) if missing else table


def _by_group(tensor: Tensor, arch: Architecture) -> Tensor:
    """[rows, ...] to [kv_heads, rows / kv_heads, ...]; works for weights and biases alike."""
    return tensor.unflatten(0, (arch.kv_heads, -1))


def _split_groups(qkv: Tensor, arch: Architecture) -> list[Tensor]:
    queries = arch.heads // arch.kv_heads * arch.head_dim
    parts = _by_group(qkv, arch).split([queries, arch.head_dim, arch.head_dim], 1)
    return [part.flatten(0, 1) for part in parts]
