"""A trainer group's state on disk, in Megatron's distributed checkpoint format plus one small JSON file.

1. Every rank writes its own shards; a checkpoint can be read by a group of another size.
2. A directory either holds a complete checkpoint or none: it is written beside its place and moved there at the end.
3. Saving and loading are collective, and the trainer must be loaded (not offloaded) for both.
4. Each rank writes from its own process. Megatron's default writer starts a manager process that stays for good and,
   in older versions, forks; neither belongs into an actor that holds a GPU.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint

from backends.ray_gpu.training.architecture import Architecture
from backends.ray_gpu.training.model import Policy
from backends.ray_gpu.training.optimizers import Optimizer
from core.errors import ConfigError, OperationFailed, RequestError
from core.model import Record

NOTE = "turnstile.json"


class Note(Record, frozen=True, kw_only=True):
    """What the JSON file says."""

    format: int = 1
    architecture: str
    step: int
    extra: dict[str, Any]


class PlainWriter(TorchDistSaveShardedStrategy):
    """Megatron's sharding and file format, written by torch's own synchronous writer."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(directory: str, model: Policy, optimizer: Optimizer, arch: Architecture, step: int, extra: dict) -> None:
    """Write a checkpoint, replacing one that is already there. `extra` is the caller's and must be plain JSON."""
    note = _encoded(Note(architecture=arch.name, step=step, extra=extra))
    final, partial = Path(directory), Path(f"{directory}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _meet()
    try:
        dist_checkpointing.save(_state(model, optimizer, loading=False), str(partial), PlainWriter())
    except (OSError, RuntimeError, CheckpointingException) as error:
        raise OperationFailed(f"the checkpoint {directory} could not be written: {error}") from error
    if dist.get_rank() == 0:
        (partial / NOTE).write_bytes(note)
        _move_into_place(partial, final)
    _meet()


def load(directory: str, model: Policy, optimizer: Optimizer, arch: Architecture) -> Note:
    """Read a checkpoint into the model and the optimizer; `ConfigError` when it is not there or of another model."""
    note = _decoded(Path(directory) / NOTE)
    if note.architecture != arch.name:
        raise ConfigError(directory, f"holds a {note.architecture}, the trainer's model is a {arch.name}")
    try:
        state = dist_checkpointing.load(_state(model, optimizer, loading=True), directory)
    except (OSError, RuntimeError, CheckpointingException) as error:
        raise ConfigError(directory, f"cannot be read into this model: {error}") from error
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state(state["optimizer"])
    return note


def _state(model: Policy, optimizer: Optimizer, *, loading: bool) -> dict[str, Any]:
    sharded = model.sharded_state_dict()
    return {"model": sharded, "optimizer": optimizer.sharded_state(sharded, loading=loading)}


def _meet() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def _encoded(note: Note) -> bytes:
    try:
        return msgspec.json.encode(note)
    except (TypeError, ValueError) as error:
        raise RequestError(f"what a checkpoint is to carry along is not plain JSON: {error}") from error


def _decoded(path: Path) -> Note:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except OSError as error:
        raise ConfigError(str(path.parent), "no complete checkpoint", "give the folder that a save made") from error
    except msgspec.DecodeError as error:
        raise ConfigError(str(path), f"not readable: {error}") from error


def _move_into_place(partial: Path, final: Path) -> None:
    """An older checkpoint of that name stays readable until the new one takes its place."""
    old = Path(f"{final}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
