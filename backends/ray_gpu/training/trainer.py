"""One rank of a trainer group: the verbs a pipeline needs, called one at a time from the process that owns it.

1. Every verb but `resident_bytes` and `loaded_bytes` is collective: all ranks of the group call it, in the same order.
2. `build` ends loaded. `offload` and `onload` are no-ops when there is nothing to do; a verb that needs the weights on
   the device raises `OperationFailed` when they are not there.
3. `train` is one optimizer step over the whole batch, whatever its size; every rank passes all rows, and the trainer
   gives each data-parallel rank its share.
4. One trainer a process: Megatron's parallel state is global.

The environment is the caller's: CUDA_VISIBLE_DEVICES must name one GPU, and what NCCL is to know must be set, before
this module is imported.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.ray_gpu.training import checkpoint, conversion, model, offload, parallel
from backends.ray_gpu.training.architecture import Architecture, check_parallel, read_architecture
from backends.ray_gpu.training.batches import Batch, batches_of, shares
from backends.ray_gpu.training.grpo import policy_loss
from backends.ray_gpu.training.logprobs import log_probs
from backends.ray_gpu.training.metrics import StepMetrics
from backends.ray_gpu.training.optimizers import Optimizer, optimizer_for
from backends.ray_gpu.training.records import Row, TrainerConfig, check_config, check_rows
from backends.ray_gpu.training.schedule import Schedule
from core.errors import OperationFailed, RequestError

__all__ = ["Row", "Trainer", "TrainerConfig"]


class Trainer:
    """One rank. Made and configured without side effects; `build` starts it, `close` ends it."""

    place: parallel.Place
    arch: Architecture
    policy: model.Policy
    reference: model.Policy | None

    def __init__(self, config: TrainerConfig) -> None:
        check_config(config)
        self.config = config
        self.step = 0
        self._built = False
        self._optimizer: Optimizer
        self._schedule: Schedule
        self._parkings: list[offload.Parking] = []

    def build(self) -> None:
        """Meet the other ranks, build the model and load the weights of the folder.

        `ConfigError` for a folder or architecture that cannot be trained, before anything is joined.
        """
        self.arch = read_architecture(self.config.model)
        check_parallel(self.arch, self.config.tp, self.config.pp)
        self.place = parallel.join(self.config)
        self.policy = self._load_model()
        self.reference = self._load_model().requires_grad_(False) if self.config.kl_coef else None
        self._optimizer = optimizer_for(self.config, self.policy, self.place)
        self._schedule = Schedule(self.place)
        self._built = True
        self._survey()
        # Every offload collects garbage, and going through all that the libraries imported would be most of its time.
        gc.collect()
        gc.freeze()

    def onload(self) -> None:
        """Parameters, gradients and optimizer state (and the reference) back on the device."""
        self._require_built()
        for parking in self._parkings:
            parking.load()

    def offload(self) -> None:
        """All of them to host memory; the device keeps nothing of this trainer that can be given back."""
        self._require_built()
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        for parking in self._parkings:
            parking.park()
        if self.place.device.type == "cuda":
            offload.drop_caches()

    def resident_bytes(self) -> int:
        """Bytes of tensors on this rank's device now: on CUDA all that torch has allocated, else the trainer's own."""
        if not self._built:
            return 0
        if self.place.device.type == "cuda":
            return torch.cuda.memory_allocated()
        return sum(parking.resident_bytes for parking in self._parkings)

    def loaded_bytes(self) -> int:
        """Bytes an onload needs on this rank's device: parameters, gradients, optimizer state, reference."""
        return sum(parking.nbytes for parking in self._parkings)

    def host_bytes(self) -> int:
        """Bytes of host memory set aside for the offloaded state, from the first offload on."""
        return sum(parking.host_bytes for parking in self._parkings)

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        """One step of GRPO on all rows; the loss is the average over all their generated tokens.

        Returns `loss`, `ratio_mean`, `ratio_max`, `clip_fraction`, `kl` (to the reference), `tokens` (generated),
        `grad_norm` (before clipping), `lr` and `step` (1 after the first), the same on every rank.
        """
        self._require_loaded()
        check_rows(rows)
        total = sum(row.generated for row in rows)
        if total == 0:
            raise RequestError("nothing to train on: no row has a generated token")
        batches = self._my_batches(rows)
        reference = self._reference_log_probs(batches)
        metrics = StepMetrics.empty(self.place.device)

        def loss_of(batch: Batch, logits: Tensor) -> Tensor:
            token = policy_loss(
                self._read(batch, logits),
                batch.behaviour,
                batch.advantages,
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
                kl_coef=self.config.kl_coef,
                reference=reference.get(batch.rows),
            )
            metrics.add(token)
            return token.loss.sum() / total

        self._optimizer.zero_grad()
        self._schedule.backward(self.policy, batches, loss_of)
        grad_norm = self._optimizer.step()
        self.step += 1
        report = metrics.reduce(self.place)
        return report | {"grad_norm": grad_norm, "lr": self.config.learning_rate, "step": float(self.step)}

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probability of each generated token under the present weights, one list a row, on every rank."""
        self._require_loaded()
        check_rows(rows)
        batches = self._my_batches(rows)
        found = self._schedule.forward(self.policy, batches, self._read)
        mine = {
            index: values.tolist()
            for batch, flat in zip(batches, found, strict=False)
            for index, values in zip(batch.rows, flat.split(batch.counts), strict=True)
        }
        return self._gathered(mine, len(rows))

    def export(self, *, on_device: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full CPU tensor), on rank 0; every rank must exhaust its iterator. `on_device`: full
        tensors where the model is; to be copied, not kept."""
        self._require_loaded()
        return conversion.export(self.policy, self.arch, self.place, on_device=on_device)

    def save(self, directory: str, extra: dict[str, Any]) -> None:
        """Write weights, optimizer state, step and the caller's `extra` (plain JSON) as one checkpoint."""
        self._require_loaded()
        checkpoint.save(directory, self.policy, self._optimizer, self.arch, self.step, extra)

    def load(self, directory: str) -> dict[str, Any]:
        """Go on from a checkpoint; returns its `extra`. The reference stays as built."""
        self._require_loaded()
        note = checkpoint.load(directory, self.policy, self._optimizer, self.arch)
        self.step = note.step
        self._survey()
        return note.extra

    def close(self) -> None:
        """Leave the group and let go of every tensor; a no-op the second time. Megatron keeps some for as long as the
        process lives."""
        if self._built:
            del self.policy, self.reference, self._optimizer, self._schedule
            self._parkings = []
            self._built = False
            if self.place.device.type == "cuda":
                offload.drop_caches()
        parallel.leave()

    def _load_model(self) -> model.Policy:
        policy = model.build(self.arch, self.place, getattr(torch, self.config.dtype))
        conversion.load(policy, self.arch, self.place, self.config.model)
        return policy

    def _survey(self) -> None:
        """Note which tensors exist; to be repeated when some were replaced."""
        cuda = self.place.device.type == "cuda"
        self._parkings = [offload.Parking(self._optimizer.kept(), self._optimizer.scratch(), cuda=cuda)]
        if self.reference is not None:
            self._parkings.append(offload.Parking(self.reference.parameters(), cuda=cuda, frozen=True))

    def _my_batches(self, rows: Sequence[Row]) -> list[Batch]:
        mine = shares(rows, self.place.dp)[self.place.dp_rank]
        return batches_of(rows, mine, self.config.micro_batch_tokens, self.place.device)

    def _read(self, batch: Batch, logits: Tensor) -> Tensor:
        vocab, temperature = self.arch.vocab, self.config.temperature
        return log_probs(logits, batch.where, batch.targets, vocab=vocab, temperature=temperature)

    def _reference_log_probs(self, batches: list[Batch]) -> dict[tuple[int, ...], Tensor]:
        """By the rows of a micro-batch; empty without a reference, and on all but the last stage."""
        if self.reference is None:
            return {}
        found = self._schedule.forward(self.reference, batches, self._read)
        return {batch.rows: values for batch, values in zip(batches, found, strict=False)}

    def _gathered(self, mine: dict[int, list[float]], count: int) -> list[list[float]]:
        if self.config.world_size == 1:
            return [mine[index] for index in range(count)]
        everyone: list[dict[int, list[float]]] = [{} for _ in range(self.config.world_size)]
        dist.all_gather_object(everyone, mine)
        merged = {index: values for part in everyone for index, values in part.items()}
        return [merged[index] for index in range(count)]

    def _require_built(self) -> None:
        if not self._built:
            raise OperationFailed("this trainer is not built, or was closed")

    def _require_loaded(self) -> None:
        self._require_built()
        if not all(parking.loaded for parking in self._parkings):
            raise OperationFailed("this trainer is offloaded; onload it first")
