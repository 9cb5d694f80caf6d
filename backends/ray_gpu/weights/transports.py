"""How weights get from a trainer to an engine, and why that way.

    cache      the node's CPU weight cache: always works, also from another node (which has its copy), also for an
               engine that wakes long after. The engine maps the bucket files itself.
    ipc        CUDA IPC: trainer and engine share a card. Handles cross, the bytes stay where they are.
    broadcast  NCCL between cards of one node, from the trainer's first rank to all ranks of the engine.

`choose` decides, as a pure function of where both are, and says why. Whatever is chosen, the trainer publishes to the
cache as well: an engine that wakes later, or one whose transport failed, reads it there, and the published copy is what
a load is verified against.

The functions for the trainer's side import torch when called; the engine's side is in its `update_weights*` methods.
"""

import io
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from backends.ray_gpu.meeting import loopback_store
from backends.ray_gpu.weights.manifest import TensorEntry
from core.errors import ConfigError, OperationFailed
from core.model import Record

Transport = Literal["cache", "ipc", "broadcast"]
TRANSPORTS: tuple[Transport, ...] = ("cache", "ipc", "broadcast")
CUMEM = "NCCL_CUMEM_ENABLE"


class Side(Record, frozen=True, kw_only=True):
    """Where a trainer's first rank, or an engine, is."""

    node: str
    device: Literal["cpu", "cuda"]
    cards: tuple[str, ...]
    """UUID of each rank's card, in rank order."""
    cumem: str | None = None
    """NCCL_CUMEM_ENABLE in its processes; None: unset. Both sides must agree, or NCCL hangs."""
    awake: bool = True
    """Whether its weights are on the device now."""


def choose(trainer: Side, engine: Side, forced: str = "") -> tuple[Transport, str]:
    """(transport, why that one and not a faster one). `forced`: use this one, if it can work here.

    A forced one that cannot work here falls back to the cache, with the reason. Raises ConfigError for an unknown name.
    """
    if forced and forced not in TRANSPORTS:
        raise ConfigError("weight transport", f"there is no {forced!r}", f"known: {', '.join(TRANSPORTS)}")
    obstacles = {"ipc": _against_ipc(trainer, engine), "broadcast": _against_broadcast(trainer, engine)}
    if forced == "cache":
        return "cache", "asked for"
    if forced == "ipc" or forced == "broadcast":
        return (
            ("cache", f"{forced} was asked for, but {obstacles[forced]}")
            if obstacles[forced]
            else (forced, "asked for")
        )
    if not obstacles["ipc"]:
        return "ipc", "trainer and engine share a card"
    if not obstacles["broadcast"]:
        return "broadcast", f"on two cards of one node; not ipc: {obstacles['ipc']}"
    return "cache", f"not ipc: {obstacles['ipc']}; not broadcast: {obstacles['broadcast']}"


def _against_ipc(trainer: Side, engine: Side) -> str:
    if against := _against_direct(trainer, engine):
        return against
    if any(card != trainer.cards[0] for card in engine.cards):
        return "a rank of the engine is on another card than the trainer's weights"
    return ""


def _against_broadcast(trainer: Side, engine: Side) -> str:
    if against := _against_direct(trainer, engine):
        return against
    ranks = (trainer.cards[0], *engine.cards)
    if len(set(ranks)) < len(ranks):
        return "NCCL cannot join two ranks on one card"
    if trainer.cumem != engine.cumem:
        return f"{CUMEM} is {trainer.cumem} in the trainer and {engine.cumem} in the engine"
    return ""


def _against_direct(trainer: Side, engine: Side) -> str:
    """What stands against any way that goes around the cache."""
    if "cpu" in (trainer.device, engine.device):
        return "there is no GPU on both sides"
    if trainer.node != engine.node:
        return "they are on two nodes"
    if not trainer.awake:
        return "the trainer's weights are off the device"
    if not engine.awake:
        return "the engine's weights are asleep"
    return ""


# --- the trainer's side ---------------------------------------------------------------------------------------------


def export_ipc(tensors: Iterable[tuple[str, Any]], ranks: int = 1) -> list[bytes]:
    """A payload for each rank of an engine on this card: handles to `tensors` ((HF name, CUDA tensor), not views into
    memory that is sometimes asleep). Keep the tensors until the engine has answered: the handles do not.

    Each rank needs a payload of its own, because opening one counts down what keeps the memory shared.
    """
    named = list(tensors)
    if wrong := [name for name, tensor in named if not tensor.is_cuda]:
        raise OperationFailed(f"{wrong[0]} is not on a GPU: there is no handle to it")
    payloads = []
    for _ in range(ranks):
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(named)
        payloads.append(buffer.getvalue())
    return payloads


def flatten(tensors: Iterable[tuple[str, Any]]) -> tuple[tuple[TensorEntry, ...], Any]:
    """Tensors of one device as one flat tensor of bytes, in order, with nothing between them: what `broadcast` sends
    and SGLang's `flattened_bucket` expects.

    Raises OperationFailed where an element would not start at a multiple of its size.
    """
    import torch

    entries: list[TensorEntry] = []
    parts: list[Any] = []
    offset = 0
    for name, tensor in tensors:
        if tensor.numel() and offset % tensor.element_size():
            raise OperationFailed(f"{name} would begin at byte {offset}: put tensors of wider types first")
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, nbytes=part.numel())
        )
        parts.append(part)
        offset += part.numel()
    return tuple(entries), torch.cat(parts)


def open_group(port: int, ranks: int, group: str, backend: str = "nccl", timeout_s: float = 60.0) -> Any:
    """Rank 0's side of a process group with `ranks` ranks of engines, which come in by `SglangEngine.join`.

    Blocks until all are there. The store that they meet at listens on loopback alone. A group of its own, beside the
    trainer's: torch has no public function for one with processes that are not in its world, so this uses the one that
    every RL framework uses.
    """
    from datetime import timedelta

    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    world, timeout = 1 + ranks, timedelta(seconds=timeout_s)
    store = loopback_store(port, world, host=True, timeout_s=timeout_s)
    made, _ = _new_process_group_helper(
        world, 0, [], Backend(backend), PrefixStore(group, store), group_name=group, timeout=timeout
    )
    _world.pg_group_ranks[made] = {rank: rank for rank in range(world)}
    return made


def broadcast(flat: Any, group: Any) -> None:
    """Send `flatten`'s bytes from rank 0. Returns when they are sent, on this side."""
    import torch
    import torch.distributed as dist

    dist.broadcast(flat, src=0, group=group)
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def close_group(group: Any) -> None:
    import torch.distributed as dist

    dist.destroy_process_group(group)
