"""How much of a real card a logical GPU may be given."""

from collections import Counter

from core.errors import ConfigError
from core.model import Cluster

GRAIN = 1 << 20
"""Budgets are whole MiB."""


def budget_of(device: str, devices: tuple[int, ...], cluster: Cluster, address: str | None) -> int | None:
    """Bytes of each logical GPU, where the cards of this machine say so: an equal share of the fullest card.

    None on a CPU, and for a cluster elsewhere, whose nodes compare the declared budgets with their cards themselves.
    Raises ConfigError if a card is not here.
    """
    if device == "cpu" or address is not None:
        return None
    from backends.ray_gpu.devices.nvml import Nvml

    with Nvml() as nvml:
        cards = {card.index: card for card in nvml.cards()}
    indices = devices[: cluster.gpus_per_node] or tuple(range(cluster.gpus_per_node))
    missing = [index for index in indices if index not in cards]
    if missing:
        raise ConfigError(
            "--devices", f"card {missing[0]} is not on this machine, which has {len(cards)}",
            "put several GPUs of the scenario on one card: --devices 0,0",
        )  # fmt: skip
    shares = [cards[index].total // count for index, count in Counter(indices).items()]
    return min(shares) // GRAIN * GRAIN
