"""Looking at a node's devices from outside the workers: the same questions for CPU slots and for GPUs."""

from typing import Protocol

from backends.ray_gpu.devices.slots import Slots
from backends.ray_gpu.places import Places
from backends.ray_gpu.processes import Processes


class Watch(Protocol):
    """Memory by logical GPU, as observed now."""

    def free(self, gpu: int) -> int:
        """Bytes of its budget that nobody uses."""
        ...

    def used_by(self, gpu: int) -> dict[str, int]:
        """Bytes by owner; the key "" is what belongs to nobody known."""
        ...

    def describe(self) -> dict[int, str]:
        """What each logical GPU really is."""
        ...

    def uuids(self) -> dict[int, str]:
        """Of the cards behind logical GPUs, where there are cards."""
        ...


class SlotWatch:
    """CPU slots."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def free(self, gpu: int) -> int:
        return self._slots.free(gpu)

    def used_by(self, gpu: int) -> dict[str, int]:
        by: dict[str, int] = {}
        for holder in self._slots.holders(gpu):
            by[holder.owner] = by.get(holder.owner, 0) + holder.nbytes
        return by

    def describe(self) -> dict[int, str]:
        return {gpu: f"a CPU slot of {budget} bytes" for gpu, budget in self._slots.budgets.items()}

    def uuids(self) -> dict[int, str]:
        return {}


def open_watch(device: str, places: Places, budgets: dict[int, int], devices: tuple[int, ...]) -> Watch:
    """For this node's logical GPUs with these budgets (bytes by id)."""
    if device == "cpu":
        return SlotWatch(Slots(places.slots, budgets))
    from backends.ray_gpu.devices.gpu_watch import GpuWatch

    return GpuWatch(Processes(places.processes).by_owner, budgets, devices)
