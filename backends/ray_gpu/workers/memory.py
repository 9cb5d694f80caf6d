"""How a worker accounts for the device memory it takes.

On a CPU slot it enters the bytes into the slot book before it takes them, and is refused there. On a GPU the driver
refuses by itself, and the bytes are seen from outside.
"""

from backends.ray_gpu.devices.slots import Slots
from backends.ray_gpu.places import Places
from backends.ray_gpu.plan import CrewPlan


class DeviceMemory:
    """One worker's memory on its GPUs, equally much on each."""

    def __init__(
        self, plan: CrewPlan, places: Places, owner: str, gpus: tuple[int, ...], budgets: dict[int, int]
    ) -> None:
        self._owner = owner
        self._gpus = gpus
        self._slots = Slots(places.slots, budgets) if plan.device == "cpu" else None

    def hold(self, kind: str, nbytes: int) -> None:
        """From now on `kind` holds `nbytes` in all, over all GPUs of the worker. Raises OutOfMemory."""
        if self._slots is not None:
            each = -(-nbytes // len(self._gpus))
            self._slots.hold_bundle(dict.fromkeys(self._gpus, each), self._owner, kind)
