"""Which card is GPU 0? From the logical GPUs of the scheduler to physical cards, on one node.

    --devices 0,1     GPU 0 is the first card visible here, GPU 1 the second (the default: one each)
    --devices 0,0     two logical GPUs on one card, each with half of its memory as its budget
    --devices 0@60,0@80,GPU-5f3b...   budgets in GiB; a card by the beginning of its UUID

Numbers count the cards that are visible here: those of CUDA_VISIBLE_DEVICES if it is set, else all, in PCI order. A
worker is pointed at its cards by UUID and then asked for the UUID that CUDA gives it (`prove`), because indices mean
different cards to different programs (CUDA_DEVICE_ORDER, containers, MIG).
"""

from collections.abc import Iterable, Mapping, Sequence

from backends.ray_gpu.devices.nvml import Card
from core.errors import ConfigError, OperationFailed
from core.model import Record
from core.units import gib, show_gib

WHERE = "--devices"


class LogicalGpu(Record, frozen=True, kw_only=True):
    id: int
    """The scheduler's."""
    uuid: str
    index: int
    """Of its card, as NVML counts."""
    budget: int
    """Bytes of the card that are this GPU's."""


class CudaMap(Record, frozen=True, kw_only=True):
    gpus: tuple[LogicalGpu, ...]
    """By id."""

    def __getitem__(self, gpu: int) -> LogicalGpu:
        for found in self.gpus:
            if found.id == gpu:
                return found
        raise ConfigError(WHERE, f"GPU {gpu} is not on this node", f"it has {', '.join(str(g.id) for g in self.gpus)}")

    def on_card(self, uuid: str) -> tuple[LogicalGpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def same_card(self, one: int, other: int) -> bool:
        """Whether a trainer on `one` and an engine on `other` share memory."""
        return self[one].uuid == self[other].uuid

    def environment(self, bundle: Sequence[int]) -> dict[str, str]:
        """Variables that show a worker exactly the cards of its logical GPUs, in this order, as devices 0, 1, ...

        Raises ConfigError if two of them lie on one card: its ranks would have to talk to each other, and NCCL cannot
        join two ranks on one card.
        """
        uuids = [self[gpu].uuid for gpu in bundle]
        if len(set(uuids)) < len(uuids):
            raise ConfigError(
                WHERE, f"GPUs {', '.join(map(str, bundle))} of one worker group lie on the same card",
                "tensor, pipeline and data parallel ranks need a card each",
            )  # fmt: skip
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(uuids),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # Ray would hide all cards from an actor without num_gpus.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }

    def __str__(self) -> str:
        return ", ".join(
            f"GPU {gpu.id} = card {gpu.index} ({gpu.uuid}) with {show_gib(gpu.budget)}" for gpu in self.gpus
        )


def visible_cards(cards: Sequence[Card], visible: str | None) -> tuple[Card, ...]:
    """The cards that a CUDA program started here would see, in its order. `visible`: CUDA_VISIBLE_DEVICES, or None.

    As CUDA does, an entry that names no card ends the list.
    """
    if visible is None:
        return tuple(cards)
    found: list[Card] = []
    for entry in (part.strip() for part in visible.split(",")):
        card = _named(cards, entry)
        if card is None:
            break
        found.append(card)
    return tuple(found)


def parse_devices(text: str, cards: Sequence[Card], first: int = 0) -> CudaMap:
    """The map that `--devices` asks for; logical ids count from `first`. Empty text: one logical GPU on each card.

    Cards are the visible ones. Raises ConfigError for an unknown card, or budgets that are more than the card.
    """
    if not cards:
        raise ConfigError(WHERE, "no NVIDIA card is visible here", "see CUDA_VISIBLE_DEVICES, or use --device cpu")
    entries = text.split(",") if text.strip() else [str(index) for index in range(len(cards))]
    asked = [_entry(entry.strip(), cards) for entry in entries]
    shares = {
        card.uuid: _share(card, [budget for other, budget in asked if other.uuid == card.uuid]) for card, _ in asked
    }
    return CudaMap(
        gpus=tuple(
            LogicalGpu(id=first + at, uuid=card.uuid, index=card.index, budget=budget or shares[card.uuid])
            for at, (card, budget) in enumerate(asked)
        )
    )


def prove(world: CudaMap, seen: Mapping[int, str]) -> None:
    """Raise OperationFailed unless each logical GPU's worker sees the card it was pointed at. `seen`: by logical GPU,
    the UUID that CUDA gave the worker (`cuda_uuids`)."""
    for gpu, uuid in sorted(seen.items()):
        if world[gpu].uuid != uuid:
            raise OperationFailed(f"a worker for GPU {gpu} runs on the card {uuid}, not on {world[gpu].uuid}")


def cuda_uuids() -> tuple[str, ...]:
    """UUIDs of the cards that this process sees, in CUDA's order. Called in a worker."""
    import torch

    return tuple(f"GPU-{torch.cuda.get_device_properties(at).uuid}" for at in range(torch.cuda.device_count()))


# --- within ---------------------------------------------------------------------------------------------------------


def _entry(entry: str, cards: Sequence[Card]) -> tuple[Card, int | None]:
    name, at, size = entry.partition("@")
    numbered = [*cards] if name.isdecimal() else []
    card = numbered[int(name)] if numbered and int(name) < len(numbered) else None
    if card is None and not name.isdecimal():
        card = _named(cards, name)
    if card is None:
        there = ", ".join(f"{at} ({card.uuid})" for at, card in enumerate(cards))
        raise ConfigError(WHERE, f"{entry!r} is none of the cards here", f"they are {there}")
    return card, _gib(entry, size) if at else None


def _named(cards: Iterable[Card], name: str) -> Card | None:
    """By NVML index, or by a beginning of the UUID that only one has."""
    if name.isdecimal():
        return next((card for card in cards if card.index == int(name)), None)
    matching = [card for card in cards if name and card.uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _gib(entry: str, size: str) -> int:
    try:
        budget = gib(float(size))
    except (ValueError, OverflowError):
        budget = 0
    if budget <= 0:
        raise ConfigError(WHERE, f"{entry!r} gives no budget", "write it in GiB, as in 0@60")
    return budget


def _share(card: Card, budgets: Sequence[int | None]) -> int:
    """What each GPU without a budget of its own gets of `card`. Raises ConfigError if the card is not large enough."""
    given = sum(budget for budget in budgets if budget is not None)
    unsaid = budgets.count(None)
    left = card.total - given
    if left < 0 or (unsaid and not left):
        raise ConfigError(
            WHERE, f"budgets of {show_gib(given)} do not fit on card {card.index}, which has {show_gib(card.total)}",
            "make them smaller",
        )  # fmt: skip
    return left // unsaid if unsaid else 0
