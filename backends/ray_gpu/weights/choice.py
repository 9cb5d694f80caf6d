"""How weights get from a trainer to an engine, and why that way. A pure function of where both are and what they do.

    cache      the node's weight cache in shared memory: always works, also on another node (which has its copy), also
               for an engine that wakes long after. The engine maps the bucket files itself.
    ipc        trainer and engine share a card: a handle crosses, the bytes stay on the card. CUDA IPC; on a CPU a
               handle to shared memory.
    broadcast  from the trainer's first rank to all ranks of the engine, on cards of one node. NCCL; on a CPU gloo.

The two direct ways need both sides' weights on their devices at the same moment: from the trainer's publication until
its offload. Whatever is chosen, the trainer publishes to the cache as well: that is what an engine that wakes later
reads, what a direct way falls back to, and what every load can be compared with.
"""

from typing import Literal

from core.errors import ConfigError
from core.model import Record

Transport = Literal["cache", "ipc", "broadcast"]
AUTO = "auto"
ASKED = (AUTO, "cache", "ipc", "broadcast")
"""What a run may ask for."""
AGREE = ("NCCL_CUMEM_ENABLE", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE")
"""Settings of NCCL that all ranks of a group must have alike. With another memory mode rank 0 hangs (seen); and each
rank takes the others' buffers to be as large as its own."""
UNSET = "unset"


class Side(Record, frozen=True, kw_only=True):
    """Where a trainer's first rank, or an engine, is."""

    node: int
    cards: tuple[int, ...]
    """The card of each rank on its node, in rank order; on a CPU the slots."""
    nccl: tuple[str, ...] = ()
    """What it has for `AGREE`, in that order."""
    awake: bool = True
    """Its weights are on the device now."""
    drains: bool = False
    """An engine that finishes its requests before new weights; that can take minutes."""


class Choice(Record, frozen=True, kw_only=True):
    transport: Transport
    why: str
    """This one, and not a faster one."""


def choose(device: str, trainer: Side, engine: Side, asked: str = AUTO) -> Choice:
    """The way for one engine. `asked`: this one if it can work, else the cache with the reason. Raises ConfigError for
    an unknown name."""
    if asked not in ASKED:
        raise ConfigError("--transport", f"there is no {asked!r}", f"known: {', '.join(ASKED)}")
    if asked == "cache":
        return Choice(transport="cache", why="asked for")
    obstacles = {"ipc": _against_ipc(device, trainer, engine), "broadcast": _against_broadcast(device, trainer, engine)}
    if asked == "ipc" or asked == "broadcast":
        against = obstacles[asked]
        why = f"{asked} was asked for, but {against}" if against else "asked for"
        return Choice(transport="cache" if against else asked, why=why)
    if device == "cpu":
        return Choice(transport="cache", why="on a CPU the cache is in shared memory already")
    if engine.drains:
        return Choice(transport="cache", why="the engine drains before it takes weights, and the trainer would wait")
    if not obstacles["ipc"]:
        return Choice(transport="ipc", why="trainer and engine share a card")
    if not obstacles["broadcast"]:
        return Choice(transport="broadcast", why=f"they are on cards of one node; not ipc: {obstacles['ipc']}")
    if obstacles["ipc"] == obstacles["broadcast"]:
        return Choice(transport="cache", why=obstacles["ipc"])
    return Choice(transport="cache", why=f"not ipc: {obstacles['ipc']}; not broadcast: {obstacles['broadcast']}")


def _against_ipc(device: str, trainer: Side, engine: Side) -> str:
    if against := _against_direct(trainer, engine):
        return against
    if device == "cuda" and any(card != trainer.cards[0] for card in engine.cards):
        return "a rank of the engine is on another card than the trainer's weights"
    return ""


def _against_broadcast(device: str, trainer: Side, engine: Side) -> str:
    if against := _against_direct(trainer, engine):
        return against
    if device != "cuda":
        return ""
    ranks = (trainer.cards[0], *engine.cards)
    if len(set(ranks)) < len(ranks):
        return "NCCL cannot join two ranks on one card"
    return disagreement(trainer.nccl, engine.nccl)


def _against_direct(trainer: Side, engine: Side) -> str:
    """What stands against any way that goes around the cache."""
    if trainer.node != engine.node:
        return "they are on two nodes"
    if not trainer.awake:
        return "the trainer's weights are off the device"
    if not engine.awake:
        return "the engine's weights are asleep"
    return ""


def disagreement(trainer: tuple[str, ...], engine: tuple[str, ...]) -> str:
    """Which setting of `AGREE` differs; empty if none does."""
    for name, ours, theirs in zip(AGREE, trainer, engine, strict=True):
        if ours != theirs:
            return f"{name} is {ours} in the trainer and {theirs} in the engine"
    return ""
