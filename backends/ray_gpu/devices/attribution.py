"""Whose memory is it? From looks at cards and our processes to what each logical GPU holds.

Two ways, and the result says which one was used, with the reason:

process  the driver names the processes on the card and what each holds, and every process of ours that is known to
         have a context there is among them. Then each byte belongs to one of our logical GPUs, to a foreign process,
         or to nobody that is named (the driver's own, and what a process that just died has not given back yet).
card     pids are hidden (a container with a pid namespace of its own) or amounts are. Then only the card's totals
         count: what is free on a logical GPU is what is free on its card, at most its budget.

Memory that nobody is named for, beyond what was there at the start (`baseline`), counts against every logical GPU of
its card: until it is gone, nobody may start there. Plain functions of plain data.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from backends.ray_gpu.devices.cuda_map import CudaMap, LogicalGpu
from backends.ray_gpu.devices.nvml import Card, ProcessMemory
from core.model import Record


class Tenant(Record, frozen=True, kw_only=True):
    """Processes of ours that belong together: a trainer's rank, an engine."""

    owner: str
    gpus: tuple[int, ...]
    """Its logical GPUs. Two of them on one card cannot be told apart: that card is then read by its totals."""
    pids: tuple[int, ...]
    """All of its processes, children included, with a context or without."""
    witnesses: tuple[int, ...] = ()
    """Those of `pids` that certainly have a context on each card of `gpus`: the driver must name them."""


class Reading(Record, frozen=True, kw_only=True):
    """What one logical GPU holds now."""

    gpu: int
    budget: int
    used: int
    """Bytes that count against the budget; by card totals, whatever is not free for it."""
    free: int
    """Bytes that the next tenant can have: within the budget, and really free on the card."""
    method: Literal["process", "card"]
    reason: str = ""
    """Why not by process; empty if by process."""
    tenants: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes by owner, as far as they are known."""
    foreign: tuple[ProcessMemory, ...] = ()
    """Processes on its card that are not ours."""
    unexplained: int = 0
    """Bytes of its card that no process is named for, beyond the baseline."""


class Split(Record, frozen=True, kw_only=True):
    """One card, byte by byte: `held` + `foreign` + `nobody` is what the card says is used."""

    held: dict[int, dict[str, int]]
    """By logical GPU and owner."""
    foreign: tuple[ProcessMemory, ...]
    nobody: int
    """May be below 0 for a moment: the driver's two figures are not read at one instant."""


def readings(
    world: CudaMap,
    cards: Iterable[Card],
    tenants: Sequence[Tenant],
    baseline: Mapping[str, int] | None = None,
    blind: Mapping[str, str] | None = None,
) -> tuple[Reading, ...]:
    """A reading of every logical GPU, by id. `baseline`: bytes by card UUID that nobody was named for at the start.
    `blind`: by card UUID, why it cannot be read process by process, where the caller knows that it cannot."""
    seen = {card.uuid: card for card in cards}
    found: list[Reading] = []
    for uuid in sorted({gpu.uuid for gpu in world.gpus}):
        gpus, card = world.on_card(uuid), seen.get(uuid)
        if card is None:
            reason = f"the card {uuid} is not there any more"
            found += [
                Reading(gpu=gpu.id, budget=gpu.budget, used=gpu.budget, free=0, method="card", reason=reason)
                for gpu in gpus
            ]
            continue
        here = [tenant for tenant in tenants if any(gpu.id in tenant.gpus for gpu in gpus)]
        reason = (blind or {}).get(uuid, "") or hidden(card, gpus, here)
        split = split_card(card, gpus, here)
        unexplained = max(0, split.nobody - (baseline or {}).get(uuid, 0))
        read = _by_card if reason else _by_process
        found += [read(gpu, card, split, unexplained, reason) for gpu in gpus]
    return tuple(sorted(found, key=lambda reading: reading.gpu))


def hidden(card: Card, gpus: Sequence[LogicalGpu], tenants: Sequence[Tenant]) -> str:
    """Why this card cannot be read process by process; empty if it can."""
    named = {process.pid: process.nbytes for process in card.processes}
    ids = {gpu.id for gpu in gpus}
    for tenant in tenants:
        if len(ids & set(tenant.gpus)) > 1:
            return f"{tenant.owner} has several logical GPUs on it"
        for pid in tenant.witnesses:
            if pid not in named:
                return f"the driver does not name process {pid} of {tenant.owner}, which has a context there"
        for pid in tenant.pids:
            if pid in named and named[pid] is None:
                return f"the driver does not say what process {pid} of {tenant.owner} holds"
    return ""


def split_card(card: Card, gpus: Sequence[LogicalGpu], tenants: Sequence[Tenant]) -> Split:
    """Every byte used on `card` to whom it belongs. A tenant with several logical GPUs here has all at the first."""
    ids = [gpu.id for gpu in gpus]
    ours = {pid: tenant for tenant in tenants for pid in tenant.pids}
    held: dict[int, dict[str, int]] = {gpu: {} for gpu in ids}
    foreign: list[ProcessMemory] = []
    for process in card.processes:
        tenant = ours.get(process.pid)
        if tenant is None:
            foreign.append(process)
            continue
        gpu = next(gpu for gpu in ids if gpu in tenant.gpus)
        held[gpu][tenant.owner] = held[gpu].get(tenant.owner, 0) + (process.nbytes or 0)
    return Split(held=held, foreign=tuple(foreign), nobody=card.used - card.attributed)


def unnamed(cards: Iterable[Card]) -> dict[str, int]:
    """Baseline: bytes by card UUID that no process is named for, taken before the first worker starts."""
    return {card.uuid: max(0, card.used - card.attributed) for card in cards}


def leftovers(before: Iterable[Card], after: Iterable[Card], tolerance: int) -> dict[str, int]:
    """Bytes by card UUID by which a card is fuller than before, where that is more than `tolerance`."""
    at_first = {card.uuid: card.used for card in before}
    more = {card.uuid: card.used - at_first.get(card.uuid, 0) for card in after}
    return {uuid: nbytes for uuid, nbytes in more.items() if nbytes > tolerance}


def _by_process(gpu: LogicalGpu, card: Card, split: Split, unexplained: int, reason: str) -> Reading:
    tenants = split.held[gpu.id]
    used = sum(tenants.values()) + unexplained
    return Reading(
        gpu=gpu.id, budget=gpu.budget, used=used, free=max(0, min(gpu.budget - used, card.free)), method="process",
        reason=reason, tenants=tenants, foreign=split.foreign, unexplained=unexplained,
    )  # fmt: skip


def _by_card(gpu: LogicalGpu, card: Card, split: Split, unexplained: int, reason: str) -> Reading:
    """Who holds what is not known, so neither are foreign processes: a named pid may be one of ours by another name."""
    free = max(0, min(gpu.budget, card.free))
    return Reading(gpu=gpu.id, budget=gpu.budget, used=gpu.budget - free, free=free, method="card", reason=reason)
