"""Process groups of a trainer group: one per process, made by Megatron's `parallel_state`, gone after `leave`.

1. Everything that a process needs in its environment (visible devices, NCCL's variables) was set before this module
   was imported; nothing here changes the environment.
2. Ranks are laid out tensor-parallel first, then data-parallel, then pipeline-parallel (Megatron's default order).
3. Dropout is off in this trainer, so no random state has to differ between ranks: Megatron's inference tracker,
   which forks nothing, stands in for the CUDA one on every device.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from backends.ray_gpu.meeting import LOOPBACK, loopback_store
from backends.ray_gpu.training.records import TrainerConfig
from core.errors import OperationFailed

JOIN_LIMIT = timedelta(minutes=5)
"""Longest a rank waits for the others, when joining and in any later collective."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands in its trainer group."""

    device: torch.device
    rank: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


def _meeting_point(config: TrainerConfig) -> dict[str, Any]:
    """On one node the ranks meet on loopback, where nobody else can listen in; across nodes at the first rank's."""
    if config.master_addr == LOOPBACK:
        limit = JOIN_LIMIT.total_seconds()
        return {"store": loopback_store(config.master_port, config.world_size, config.rank == 0, limit)}
    return {"init_method": f"tcp://{config.master_addr}:{config.master_port}"}


def join(config: TrainerConfig) -> Place:
    """Meet the other ranks of the group; returns when all are there.

    On CUDA the process uses its current device, which the caller chose through CUDA_VISIBLE_DEVICES. Raises
    `OperationFailed` when the ranks do not meet in time or CUDA is not there.
    """
    if dist.is_initialized():
        raise OperationFailed("this process already belongs to a trainer group; a trainer needs a process of its own")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise OperationFailed("a trainer on cuda was asked for, but torch sees no CUDA device in this process")
    try:
        dist.init_process_group(
            "nccl" if config.device == "cuda" else "gloo",
            **_meeting_point(config),
            rank=config.rank,
            world_size=config.world_size,
            timeout=JOIN_LIMIT,
        )
    except (RuntimeError, ValueError) as error:
        raise OperationFailed(
            f"rank {config.rank} of {config.world_size} could not join at "
            f"{config.master_addr}:{config.master_port}: {error}"
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        create_gloo_process_groups=config.device == "cuda",
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(config.seed)
    index = torch.cuda.current_device() if config.device == "cuda" else None
    return Place(
        device=torch.device(config.device, index),
        rank=config.rank,
        tp=config.tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=config.pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def leave() -> None:
    """Dissolve this process's groups; a no-op when it is in none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
