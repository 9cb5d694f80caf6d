"""GPUs behind the questions of `watch`: a node's cards through NVML, attributed to workers by their process records.

1. Cards are counted as NVML counts them, whatever CUDA_VISIBLE_DEVICES says: that variable is about the process that
   has it, and Ray sets it for this one.
2. A process on a card is ours if it, or a process it descends from, is on record. So a worker's children count for it
   without being recorded one by one.
3. A look is shared by all questions asked within `FRESH_S` of it.
"""

import time
from collections.abc import Callable, Mapping

from backends.ray_gpu.devices.attribution import Reading, Tenant, readings, unnamed
from backends.ray_gpu.devices.cuda_map import CudaMap, LogicalGpu
from backends.ray_gpu.devices.nvml import Card, Nvml
from core.errors import ConfigError
from core.units import show_gib

FRESH_S = 0.001
CONTEXT = 64 << 20
"""Bytes: no process has a CUDA context on a card for less, so more that nobody is named for may be one of ours."""

Records = Callable[[], Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]]
"""What is on record now: by owner, its pids and its logical GPUs."""


class GpuWatch:
    """The logical GPUs of one node. `budgets`: bytes by id; `devices`: NVML index of the card of each, in the order of
    the ids (empty: each its own)."""

    def __init__(
        self, records: Records, budgets: Mapping[int, int], devices: tuple[int, ...] = (), nvml: Nvml | None = None
    ) -> None:
        self._records = records
        self._nvml = nvml or Nvml()
        cards = self._nvml.cards()
        self.world = place(budgets, devices, cards)
        self._baseline = unnamed(cards)
        self._names = {card.uuid: card.name for card in cards}
        self._seen: tuple[float, dict[int, Reading]] = (float("-inf"), {})

    def reading(self, gpu: int) -> Reading:
        """What the logical GPU holds now, and how that is known."""
        at, found = self._seen
        if time.monotonic() - at > FRESH_S:
            found = self._look()
            self._seen = time.monotonic(), found
        return found[gpu]

    def free(self, gpu: int) -> int:
        return self.reading(gpu).free

    def used_by(self, gpu: int) -> dict[str, int]:
        reading = self.reading(gpu)
        nobody = reading.used - sum(reading.tenants.values())
        return reading.tenants | ({"": nobody} if nobody > 0 else {})

    def describe(self) -> dict[int, str]:
        told = {}
        for gpu in self.world.gpus:
            reading = self.reading(gpu.id)
            how = "by process" if reading.method == "process" else f"by the card's total, because {reading.reason}"
            if reading.method == "process" and not reading.tenants:
                how += " where the driver names ours"  # nothing of ours is there yet to see it by
            foreign = f"; {len(reading.foreign)} foreign processes on it" if reading.foreign else ""
            told[gpu.id] = (
                f"{show_gib(gpu.budget)} of card {gpu.index}, {self._names[gpu.uuid]}, {gpu.uuid}, read {how}{foreign}"
            )
        return told

    def uuids(self) -> dict[int, str]:
        return {gpu.id: gpu.uuid for gpu in self.world.gpus}

    def close(self) -> None:
        self._nvml.close()

    def _look(self) -> dict[int, Reading]:
        cards = self._nvml.cards()
        tenants = tenants_of(self._records(), cards)
        blind = {card.uuid: why for card in cards if (why := self._blindness(card, tenants))}
        return {reading.gpu: reading for reading in readings(self.world, cards, tenants, self._baseline, blind)}

    def _blindness(self, card: Card, tenants: list[Tenant]) -> str:
        """Why the driver's pids mean nothing here; empty if they do.

        The sign of a pid namespace: workers of ours have this card, memory is in use on it, and no name leads to any of
        them. A worker that has not touched its card yet has nothing there, so it is no such sign by itself.
        """
        here = {gpu.id for gpu in self.world.on_card(card.uuid)}
        ours = {pid for tenant in tenants if here & set(tenant.gpus) for pid in tenant.pids}
        if not ours or any(process.pid in ours for process in card.processes):
            return ""
        strangers = [process.pid for process in card.processes if parent_of(process.pid) is None]
        nobody = card.used - card.attributed - self._baseline.get(card.uuid, 0)
        if strangers:
            return f"the driver names processes that do not exist here ({strangers[0]}, say)"
        return "the driver names no processes" if nobody > CONTEXT else ""


def place(budgets: Mapping[int, int], devices: tuple[int, ...], cards: tuple[Card, ...]) -> CudaMap:
    """Logical GPUs on cards. Raises ConfigError if a card is not there, or too small for the budgets on it."""
    ids = sorted(budgets)
    indices = devices or tuple(range(len(ids)))
    by_index = {card.index: card for card in cards}
    for index in indices:
        if index not in by_index:
            there = f"there are cards {', '.join(map(str, by_index))}" if by_index else "there is none"
            raise ConfigError("--devices", f"card {index} is not on this node", there)
    gpus = tuple(
        LogicalGpu(id=gpu, uuid=by_index[index].uuid, index=index, budget=budgets[gpu])
        for gpu, index in zip(ids, indices, strict=True)
    )
    world = CudaMap(gpus=gpus)
    for index in dict.fromkeys(indices):
        card = by_index[index]
        wanted = sum(gpu.budget for gpu in world.on_card(card.uuid))
        if wanted > card.total:
            raise ConfigError(
                "--devices",
                f"budgets of {show_gib(wanted)} do not fit on card {index}, which has {show_gib(card.total)}",
                "declare less memory for each GPU (cluster.gpu_memory_gib)",
            )
    return world


def tenants_of(records: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], cards: tuple[Card, ...]) -> list[Tenant]:
    """Our workers, with those of the processes on the cards that descend from them."""
    roots = {pid: owner for owner, (pids, _) in records.items() for pid in pids}
    found = {owner: dict.fromkeys(pids) for owner, (pids, _) in records.items()}
    for pid in {process.pid for card in cards for process in card.processes}:
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in roots:
            ancestor = parent_of(ancestor)
        if ancestor is not None:
            found[roots[ancestor]][pid] = None
    return [Tenant(owner=owner, gpus=records[owner][1], pids=tuple(pids)) for owner, pids in found.items()]


def parent_of(pid: int) -> int | None:
    """Its parent's pid; None if there is no such process here, or it has none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1]) or None
    except (FileNotFoundError, ProcessLookupError):
        return None
