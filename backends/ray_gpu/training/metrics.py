"""What a training step reports: sums and a maximum gathered on the last stage, the same numbers on every rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from backends.ray_gpu.training.grpo import TokenLoss
from backends.ray_gpu.training.parallel import Place

SUMS = ("loss", "ratio", "clipped", "kl", "tokens")


@dataclass
class StepMetrics:
    """Running totals over this rank's micro-batches."""

    sums: Tensor
    """[len(SUMS)] float64."""
    highest: Tensor
    """[1] float64: the largest ratio."""

    @classmethod
    def empty(cls, device: torch.device) -> "StepMetrics":
        zeros = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        return cls(zeros, torch.zeros(1, dtype=torch.float64, device=device))

    def add(self, token: TokenLoss) -> None:
        if token.ratio.numel() == 0:
            return
        parts = (token.loss.detach(), token.ratio, token.clipped, token.kl, torch.ones_like(token.ratio))
        self.sums += torch.stack([part.double().sum() for part in parts])
        self.highest = self.highest.maximum(token.ratio.double().max())

    def reduce(self, place: Place) -> dict[str, float]:
        """Averages over the valid tokens of the whole batch. Collective.

        Every tensor-parallel rank of the last stage counted the same tokens; other stages counted none.
        """
        groups = []
        if place.dp > 1:
            groups.append(parallel_state.get_data_parallel_group())
        if place.pp > 1:
            groups.append(parallel_state.get_pipeline_model_parallel_group())
        for group in groups:
            dist.all_reduce(self.sums, group=group)
            dist.all_reduce(self.highest, op=dist.ReduceOp.MAX, group=group)
        loss, ratio, clipped, kl, tokens = self.sums.tolist()
        return {
            "loss": loss / tokens,
            "ratio_mean": ratio / tokens,
            "ratio_max": self.highest.item(),
            "clip_fraction": clipped / tokens,
            "kl": kl / tokens,
            "tokens": tokens,
        }
