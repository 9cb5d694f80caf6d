"""Rows to micro-batches: who gets which rows, and how many go through the model at once.

1. Every rank computes the same split from the same rows; no rank is told its share.
2. A micro-batch is rows padded on the right to its longest. Its cost is its padded tokens, so rows of similar length
   go together, and memory is bounded by a number of tokens whatever the lengths are.
3. Each row is in exactly one micro-batch, and results go back in the order of the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.ray_gpu.training.records import Row


def shares(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """Row indices of each data-parallel rank: longest first, each to the rank with the fewest tokens so far."""
    loads = [0] * ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(rows)), key=lambda i: (-len(rows[i].tokens), i)):
        rank = loads.index(min(loads))
        taken[rank].append(index)
        loads[rank] += len(rows[index].tokens)
    return taken


def micro_batches(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Positions grouped so that (rows x longest) of a group is at most `limit`; a longer row is a group of its own."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and longest * (len(groups[-1]) + 1) <= limit:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device: b rows, s input tokens (the last of a row is never an input), n predictions."""

    rows: tuple[int, ...]
    """Index of each row in the caller's list."""
    counts: tuple[int, ...]
    """Generated tokens of each row; they follow one another in the [n] tensors below."""
    ids: Tensor
    """[b, s] int64, padded on the right with token 0: causal attention lets no real token see the padding."""
    positions: Tensor
    """[b, s] int64."""
    where: Tensor
    """[n] int64: flat index in [b * s] of the position that predicts each generated token."""
    targets: Tensor
    """[n] int64: the generated tokens."""
    behaviour: Tensor
    """[n] float32."""
    advantages: Tensor
    """[n] float32: each row's advantage, once per generated token."""


def batch_of(rows: Sequence[Row], indices: Sequence[int], device: torch.device) -> Batch:
    """The rows at `indices` as one micro-batch."""
    width = max(1, max(len(rows[index].tokens) for index in indices) - 1)
    ids = torch.zeros(len(indices), width, dtype=torch.int64)
    where: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    for line, index in enumerate(indices):
        row = rows[index]
        inputs = row.tokens[:-1]
        ids[line, : len(inputs)] = torch.tensor(inputs, dtype=torch.int64)
        first = line * width + row.prompt_tokens - 1
        where.extend(range(first, first + row.generated))
        targets.extend(row.tokens[row.prompt_tokens :])
        behaviour.extend(row.logprobs)
        advantages.extend([row.advantage] * row.generated)
    positions = torch.arange(width).expand(len(indices), width).contiguous()
    return Batch(
        rows=tuple(indices),
        counts=tuple(rows[index].generated for index in indices),
        ids=ids.to(device),
        positions=positions.to(device),
        where=torch.tensor(where, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
    )


def batches_of(rows: Sequence[Row], indices: Sequence[int], limit: int, device: torch.device) -> list[Batch]:
    """The micro-batches of one data-parallel rank's share of the rows."""
    groups = micro_batches([len(rows[index].tokens) for index in indices], limit)
    return [batch_of(rows, [indices[position] for position in group], device) for group in groups]
