"""Which card each logical GPU is on, and how much of it that GPU may have: what `--devices` asks for, on real cards.

    --devices 0,0              two logical GPUs on card 0, half of its memory each
    --devices 0@60,0@60        60 GiB each
    --devices GPU-5f3b,GPU-77  cards by the beginning of their UUIDs, on this machine

All logical GPUs of a cluster have the same memory, so budgets are all the same or none is given.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from core.errors import ConfigError
from core.model import Cluster
from core.units import gib, show_gib

GRAIN = 1 << 20
"""Shares of a card are whole MiB."""
WHERE = "--devices"


class Cards(NamedTuple):
    indices: tuple[int, ...]
    """Of the card of each logical GPU on its node, as NVML counts; empty: each its own."""
    budget: int | None
    """Bytes of each logical GPU; None: what the scenario declares."""


def cards_of(device: str, asked: Sequence[int | str], cluster: Cluster, address: str | None, nvml: Any = None) -> Cards:
    """`asked`: an entry a logical GPU (none: one card each). Without a budget each gets an equal share of the fullest
    card; not on a CPU, and not in a cluster elsewhere, whose nodes compare what is declared with their cards.

    Raises ConfigError for a card that is not here, or budgets that do not fit on it. `nvml`: for tests.
    """
    if device == "cpu":
        return Cards((), None)
    parts = [str(entry).partition("@") for entry in asked]
    budget = _budget([size for _, _, size in parts])
    if address is not None:
        return Cards(tuple(_number(name) for name, _, _ in parts), budget)
    from backends.ray_gpu.devices.nvml import Nvml

    with nvml or Nvml() as opened:
        cards = {card.index: card for card in opened.cards()}
    indices = tuple(_index(name, cards) for name, _, _ in parts)
    on_node = indices[: cluster.gpus_per_node] or tuple(range(cluster.gpus_per_node))
    if missing := [index for index in on_node if index not in cards]:
        raise ConfigError(
            WHERE, f"card {missing[0]} is not on this machine, which has {len(cards)}",
            "put several GPUs of the scenario on one card: --devices 0,0",
        )  # fmt: skip
    counts = Counter(on_node)
    if budget is None:
        return Cards(indices, min(cards[index].total // count for index, count in counts.items()) // GRAIN * GRAIN)
    for index, count in counts.items():
        if count * budget > cards[index].total:
            problem = f"budgets of {show_gib(count * budget)} do not fit on card {index}, which has "
            raise ConfigError(WHERE, problem + show_gib(cards[index].total), "make them smaller")
    return Cards(indices, budget)


def _budget(sizes: Sequence[str]) -> int | None:
    given = list(dict.fromkeys(sizes)) or [""]
    if len(given) > 1:
        named = " and ".join(f"@{size}" if size else "none" for size in given[:2])
        raise ConfigError(WHERE, f"budgets differ ({named})", "all GPUs of a cluster have the same memory")
    return gib(float(given[0])) if given[0] else None


def _number(name: str) -> int:
    if not name.isdecimal():
        raise ConfigError(WHERE, f"{name}: cards of a cluster elsewhere go by number", "count as nvidia-smi does there")
    return int(name)


def _index(name: str, cards: dict[int, Any]) -> int:
    if name.isdecimal():
        return int(name)
    matching = [card.index for card in cards.values() if card.uuid.startswith(name)]
    if len(matching) != 1:
        there = ", ".join(f"{card.index} ({card.uuid})" for card in cards.values()) or "there is none"
        raise ConfigError(WHERE, f"{name} is the beginning of {len(matching)} cards' UUIDs", f"cards here: {there}")
    return matching[0]
