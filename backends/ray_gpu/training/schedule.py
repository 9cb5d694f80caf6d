"""Micro-batches through the pipeline stages of one model replica.

1. With one stage this is plain gradient accumulation.
2. With several, micro-batches go in waves of at most `WAVE` x stages: all forward, then all backward (GPipe, Huang et
   al. 2018, arXiv 1811.06965). A wave bounds the activations alive at once; its idle share is
   (stages - 1) / (WAVE x stages + stages - 1). Within a phase data flows one way only, so two stages can never wait
   for each other, over gloo as over NCCL.
3. No activation outlives a call: the model lets go of the last hidden states it received.
4. What a micro-batch means (loss or log-probabilities) is the caller's; only the last stage calls it.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from backends.ray_gpu.training.batches import Batch
from backends.ray_gpu.training.model import Policy
from backends.ray_gpu.training.parallel import Place

WAVE = 2
T = TypeVar("T")


class Schedule:
    """Runs micro-batches through one replica; every rank of it gets the same batches in the same order."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._ranks = dist.get_process_group_ranks(self._group)

    def forward(self, model: Policy, batches: Sequence[Batch], read: Callable[[Batch, Tensor], T]) -> list[T]:
        """`read(batch, logits)` for each batch without gradients, on the last stage; an empty list on the others."""
        results = []
        with torch.no_grad():
            for batch in batches:
                output = self._step(model, batch, self._receive_hidden(model, batch))
                if self._place.last_stage:
                    results.append(read(batch, output))
        model.set_input_tensor(None)
        return results

    def backward(self, model: Policy, batches: Sequence[Batch], loss_of: Callable[[Batch, Tensor], Tensor]) -> None:
        """Add the gradients of the sum of `loss_of(batch, logits)` over all batches."""
        size = WAVE * self._place.pp if self._place.pp > 1 else 1
        for start in range(0, len(batches), size):
            self._wave(model, batches[start : start + size], loss_of)
        model.set_input_tensor(None)

    def _wave(self, model: Policy, batches: Sequence[Batch], loss_of: Callable[[Batch, Tensor], Tensor]) -> None:
        alive: list[tuple[Tensor | None, Tensor]] = []
        for batch in batches:
            received = self._receive_hidden(model, batch)
            if received is not None:
                received.requires_grad_()
            output = self._step(model, batch, received)
            alive.append((received, loss_of(batch, output) if self._place.last_stage else output))
        for received, output in alive:
            self._backward_one(received, output)

    def _step(self, model: Policy, batch: Batch, received: Tensor | None) -> Tensor:
        """One forward pass: logits [b, s, v] on the last stage, else hidden states [s, b, h], already sent on."""
        model.set_input_tensor(received)
        output = model(batch.ids, batch.positions, None)
        if not self._place.last_stage:
            dist.send(output.detach().contiguous(), self._ranks[self._place.pp_rank + 1], group=self._group)
        return output

    def _receive_hidden(self, model: Policy, batch: Batch) -> Tensor | None:
        if self._place.first_stage:
            return None
        rows, width = batch.ids.shape
        hidden = torch.empty(
            width, rows, model.config.hidden_size, dtype=model.config.params_dtype, device=self._place.device
        )
        dist.recv(hidden, self._ranks[self._place.pp_rank - 1], group=self._group)
        return hidden

    def _backward_one(self, received: Tensor | None, output: Tensor) -> None:
        if self._place.last_stage:
            output.backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self._ranks[self._place.pp_rank + 1], group=self._group)
            output.backward(gradient)
        if received is not None:
            dist.send(received.grad.contiguous(), self._ranks[self._place.pp_rank - 1], group=self._group)
