"""One optimizer step: gradients reduced over the group, clipped by their global norm, Adam.

Two implementations of one interface. On the CPU, torch's AdamW on a model whose gradients live in one flat buffer; on
CUDA, Megatron's DistributedDataParallel and distributed optimizer. They agree on everything a user can set.

1. The loss was divided by the tokens of the whole batch, so gradients are *summed* over data-parallel ranks.
2. All state exists from the start: what an onload needs is known before the first step, and never grows.
3. A step whose gradient is not finite fails and changes no weight.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from backends.ray_gpu.training.model import Policy
from backends.ray_gpu.training.parallel import Place
from backends.ray_gpu.training.records import TrainerConfig
from core.errors import OperationFailed

ADAM_EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer(Protocol):
    """What the trainer asks of either implementation."""

    def zero_grad(self) -> None:
        """Gradients to zero, before the first micro-batch of a step."""

    def step(self) -> float:
        """Reduce, clip, update; returns the global gradient norm before clipping. Collective."""

    def kept(self) -> Iterator[Tensor]:
        """Every device tensor whose content must survive an offload: parameters and optimizer state."""

    def scratch(self) -> Iterator[Tensor]:
        """Every device tensor that holds nothing between two steps: gradients."""

    def sharded_state(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """State for Megatron's distributed checkpointing, sharded as the model is."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state that distributed checkpointing loaded. Tensors may be replaced by new ones."""


def optimizer_for(config: TrainerConfig, model: Policy, place: Place) -> "HostAdam | DistributedAdam":
    return DistributedAdam(config, model, place) if place.device.type == "cuda" else HostAdam(config, model, place)


class HostAdam:
    """AdamW in float32 on the CPU, the same on every data-parallel rank."""

    def __init__(self, config: TrainerConfig, model: Policy, place: Place) -> None:
        self._model = model
        self._place = place
        self._clip = config.grad_clip
        self._params = list(model.parameters())
        self._grads = torch.zeros(sum(param.numel() for param in self._params))
        offset = 0
        for param in self._params:
            param.grad = self._grads[offset : offset + param.numel()].view_as(param)
            offset += param.numel()
        self.inner = torch.optim.AdamW(
            _decayed_apart(self._params, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=ADAM_EPS,
        )
        _allocate_state(self.inner)

    def zero_grad(self) -> None:
        self._grads.zero_()

    def step(self) -> float:
        self._reduce()
        norm = self._norm()
        if not math.isfinite(norm):
            raise OperationFailed(f"the gradient norm is {norm}; no weight was changed")
        if 0 < self._clip < norm:
            self._grads.mul_(self._clip / (norm + 1e-6))
        self.inner.step()
        return norm

    def kept(self) -> Iterator[Tensor]:
        yield from self._params
        yield from _state_tensors(self.inner)

    def scratch(self) -> Iterator[Tensor]:
        yield self._grads

    def sharded_state(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        sharded = get_param_id_to_sharded_param_map(model_state, self._params)
        moments = {
            f"{index}.{name}": make_sharded_optimizer_tensor(
                sharded[index], self.inner.state[param][name], f"optimizer.{name}"
            )
            for index, param in enumerate(self._params)
            for name in MOMENTS
        }
        return {"moments": moments, "steps": self._steps()}

    def load_state(self, state: dict[str, Any]) -> None:
        for index, param in enumerate(self._params):
            mine = self.inner.state[param]
            mine["step"].fill_(state["steps"])
            for name in MOMENTS:
                mine[name].copy_(state["moments"][f"{index}.{name}"])

    def _steps(self) -> float:
        return self.inner.state[self._params[0]]["step"].item()

    def _reduce(self) -> None:
        if self._place.dp > 1:
            dist.all_reduce(self._grads, group=parallel_state.get_data_parallel_group())
        if self._place.tp > 1:
            # Each rank saw only its own heads go through the shared query and key norms.
            for name, param in self._model.named_parameters():
                if "q_layernorm" in name or "k_layernorm" in name:
                    dist.all_reduce(param.grad, group=parallel_state.get_tensor_model_parallel_group())
        for param in self._params:
            if getattr(param, "shared_embedding", False):
                dist.all_reduce(param.grad, group=parallel_state.get_embedding_group())

    def _norm(self) -> float:
        counted = [p for p in self._params if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)]
        square = torch.stack([param.grad.double().square().sum() for param in counted] or [torch.zeros(()).double()])
        total = square.sum()
        if self._place.tp * self._place.pp > 1:
            dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
        return math.sqrt(total.item())


class DistributedAdam:
    """Megatron's distributed optimizer: float32 master weights and state, split over data-parallel ranks."""

    def __init__(self, config: TrainerConfig, model: Policy, place: Place) -> None:
        self._place = place
        self._ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            model,
        )
        bf16 = config.dtype == "bfloat16"
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=ADAM_EPS,
                weight_decay=config.weight_decay,
                clip_grad=config.grad_clip or math.inf,  # 0 would skip the norm too
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=True,
            ),
            [self._ddp],
        )
        for optimizer in self._torch_optimizers():
            _allocate_state(optimizer)

    def zero_grad(self) -> None:
        self._ddp.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self) -> float:
        self._reduce()
        self._refuse_bad_gradients()
        _, norm, _ = self.inner.step()
        # The shards' float32 gradients outlive the step otherwise, and with them whole segments of device memory.
        self.inner.zero_grad()
        return float(norm or 0.0)

    def kept(self) -> Iterator[Tensor]:
        for buffer in self._ddp.buffers:
            yield buffer.param_data
        yield from self._ddp.module.parameters()
        for optimizer in self._torch_optimizers():
            yield from itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
            yield from _state_tensors(optimizer)

    def scratch(self) -> Iterator[Tensor]:
        for buffer in self._ddp.buffers:
            yield buffer.grad_data

    def sharded_state(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        return self.inner.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)

    def load_state(self, state: dict[str, Any]) -> None:
        for part in self._parts():
            _leave_counters_alone(part)
        self.inner.load_state_dict(state)
        for optimizer in self._torch_optimizers():
            for mine in optimizer.state.values():
                # Megatron hands one counter to all parameters, and AdamW would count it up once for each.
                mine["step"] = mine["step"].clone()

    def _parts(self) -> list[Any]:
        return getattr(self.inner, "chained_optimizers", [self.inner])

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self._parts() if part.optimizer is not None]

    def _reduce(self) -> None:
        """Sum over data-parallel ranks; then what tensor-parallel ranks and tied stages share.

        A group of one has nothing to reduce, and would make NCCL set up a communicator to find that out.
        """
        if self._place.dp * self._place.tp * self._place.pp > 1:
            finalize_model_grads([self._ddp])

    def _refuse_bad_gradients(self) -> None:
        finite = torch.stack([buffer.grad_data.isfinite().all() for buffer in self._ddp.buffers]).all()
        bad = 1.0 - finite.float()
        if dist.get_world_size() > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            raise OperationFailed("the gradient is not finite; no weight was changed")


def _leave_counters_alone(part: Any) -> None:
    """Let Megatron load moments beside AdamW's step counters. It takes a counter for one more sharded tensor, looks for
    it among those of the checkpoint, where it never is (they are in the parameter groups), and fails."""
    inner = part._set_main_param_and_optimizer_states
    part._set_main_param_and_optimizer_states = lambda param, tensors: inner(param, {"step": None, **tensors})


def _decayed_apart(params: Iterable[Tensor], weight_decay: float) -> list[dict]:
    """Two parameter groups, as Megatron makes them: matrices decay, biases and norm weights do not."""
    matrices, vectors = [], []
    for param in params:
        (matrices if param.ndim > 1 else vectors).append(param)
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """What AdamW itself would allocate in its first step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{name: torch.zeros_like(param) for name in MOMENTS},
            }


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Moments only: the step counters are single numbers that AdamW keeps on the CPU."""
    for state in optimizer.state.values():
        yield from (state[name] for name in MOMENTS)
