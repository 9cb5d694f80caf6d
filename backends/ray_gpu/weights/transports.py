"""The two ways from device to device, both ends of each: handles to memory, and broadcasts in a process group.

What travels are the buckets of a published version as they lie in the cache (`staged`), byte for byte, each one flat
tensor. torch is imported by the functions that need it; SGLang's processes import this room too.
"""

import io
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

from backends.ray_gpu.meeting import loopback_store
from core.errors import OperationFailed
from core.model import Record

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
"""What carries a broadcast, by device."""
LOOK_S = 0.0005
"""Pause between two looks at whether NCCL is through: it has no wait that another thread could end."""


# --- handles ----------------------------------------------------------------------------------------------


def export_handles(buckets: Sequence[Any], label: str) -> bytes:
    """Handles to flat tensors, for another process on the same card (on a CPU: of the same node). Keep the tensors
    until it is done with them: handles do not.

    `label` goes with the first one, empty strings with the others: pairs are what SGLang's door takes. One payload is
    for one process, because opening it counts down what keeps the memory shared.
    """
    import torch

    if any(not bucket.is_cuda for bucket in buckets):
        # The other kind of handle is a file descriptor, which only a child of this process could fetch.
        torch.multiprocessing.set_sharing_strategy("file_system")
    named = [(label if index == 0 else "", bucket) for index, bucket in enumerate(buckets)]
    payload = io.BytesIO()
    ForkingPickler(payload).dump(named)
    return payload.getvalue()


def open_handles(payload: bytes) -> list[Any]:
    """The tensors behind `export_handles`, where they lie. Raises OperationFailed if they are gone."""
    import torch.multiprocessing  # noqa: F401 - knows how to open them

    try:
        return [tensor for _, tensor in ForkingPickler.loads(payload)]
    except (OSError, RuntimeError) as error:
        raise OperationFailed(f"the trainer's memory cannot be opened: {error}") from error


# --- broadcasts -------------------------------------------------------------------------------------------


class Meeting(Record, frozen=True, kw_only=True):
    """What both sides must know to form a process group: rank 0 is the trainer's, 1 and up are an engine's."""

    name: str
    port: int
    """On loopback."""
    ranks: int
    """Of the engine."""
    backend: str
    timeout_s: float


def open_group(meeting: Meeting) -> Any:
    """The trainer's side. The store that they meet at listens on loopback alone. Raises OperationFailed."""
    return _group(meeting, 0)


def join_group(meeting: Meeting, rank: int) -> Any:
    """An engine's side, as rank 1 or higher. Raises OperationFailed."""
    return _group(meeting, rank)


def _group(meeting: Meeting, rank: int) -> Any:
    """A process group beside whatever others this process is in: torch has no public function for one with processes
    that are not in its own world, so this uses the one that every RL framework uses."""
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    world, limit = 1 + meeting.ranks, meeting.timeout_s
    try:
        store = PrefixStore(meeting.name, loopback_store(meeting.port, world, host=rank == 0, timeout_s=limit))
        made, _ = _new_process_group_helper(
            world, rank, [], Backend(meeting.backend), store, group_name=meeting.name, timeout=timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise OperationFailed(f"no process group: {_first(error)}") from error
    _world.pg_group_ranks[made] = {each: each for each in range(world)}
    return made


def send(buckets: Sequence[Any], group: Any, stop: threading.Event) -> None:
    """Rank 0's side: send flat tensors one after another. Returns when the last is through.

    `stop`: whoever should receive is dead. NCCL would wait for it. Raises OperationFailed then, or if sending fails;
    the group is of no use any more.
    """
    try:
        for bucket in buckets:
            _through(group.broadcast(bucket, 0), bucket, stop)
    except RuntimeError as error:
        raise OperationFailed(f"the broadcast failed: {_first(error)}") from error


def receive(sizes: Sequence[int], group: Any, device: Any) -> Iterator[Any]:
    """A rank's side: flat tensors of so many bytes, one after another; each on the device until the next is asked for.

    Raises OperationFailed if the trainer is gone.
    """
    import torch

    never = threading.Event()
    for size in sizes:
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        try:
            _through(group.broadcast(bucket, 0), bucket, never)
        except RuntimeError as error:
            raise OperationFailed(f"the broadcast failed: {_first(error)}") from error
        yield bucket


def _through(work: Any, tensor: Any, stop: threading.Event) -> None:
    """Wait for a broadcast."""
    if not tensor.is_cuda:
        work.wait()
        return
    while not work.is_completed():
        if stop.is_set():
            raise OperationFailed("the engine is gone")
        time.sleep(LOOK_S)
    work.wait()  # raises what went wrong, and lets this thread's stream follow


def close_group(group: Any, *, broken: bool = False) -> None:
    """Leave a group, and give back what its communicator holds. `broken`: a peer is gone; nobody is waited for."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _abort_process_group

    if broken and "nccl" in dist.get_backend(group):
        _abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def _first(error: Exception) -> str:
    """Line of torch's errors, which go on with a stack of C++."""
    return next(iter(str(error).splitlines()), type(error).__name__)
