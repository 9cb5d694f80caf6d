"""All reachable states, breadth first, so that the first way to a state is a shortest one.

The graph is kept in flat arrays: a state costs its packed bytes and a few integers, a transition six bytes. A search
can be stopped at any number of states, saved, and taken up again where it stopped.
"""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from core.errors import ConfigError, InvariantBroken
from core.verify import moves, rules
from core.verify.client import waits_for_lease, waits_for_rollout
from core.verify.node import Node
from core.verify.packing import Codec
from core.verify.symmetry import Symmetry
from core.verify.world import World

FAULT = 254
"""Class of a transition that spends a fault."""


class Graph:
    """The states found so far by number, and the transitions between those that were expanded."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: list[bytes] = []
        self.numbers: dict[bytes, int] = {}
        self.parents = array("I")
        """The state from which each was first reached."""
        self.first_out = array("Q", [0])
        """Where each expanded state's transitions begin in `targets`; one more entry than expanded states."""
        self.targets = array("I")
        self.classes = array("B")
        """Fairness class of each transition."""
        self.symmetry = Symmetry(world)
        self.turns = array("B")
        """Of each transition, the number of the permutation that leads from the state it found to the one kept."""
        self.asked = list(range(world.pipelines))
        """The pipelines whose waits are looked at."""
        self.hungry = array("B")
        """Bit i: pipeline i is initialised and wants trajectories."""
        self.asking = array("B")
        """Bit i: pipeline i waits for a lease."""
        self.broken: tuple[int, moves.Move | None, str] | None = None
        """The first rule broken: in which state, by which move (None: in the state itself), and how."""

    @property
    def expanded(self) -> int:
        return len(self.first_out) - 1

    @property
    def complete(self) -> bool:
        return self.expanded == len(self.keys)

    def number(self, key: bytes, parent: int) -> int:
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.keys)
            self.keys.append(key)
            self.parents.append(parent)
        return found

    def edge(self, key: bytes, parent: int, kind: int) -> None:
        """A transition of the state being expanded."""
        kept, turn = self.symmetry.canonical(key)
        self.targets.append(self.number(kept, parent))
        self.classes.append(kind)
        self.turns.append(turn)

    def out(self, state: int) -> Iterator[tuple[int, int]]:
        """Transitions of an expanded state: (target, class)."""
        for edge in range(self.first_out[state], self.first_out[state + 1]):
            yield self.targets[edge], self.classes[edge]

    def path(self, state: int) -> list[int]:
        """A shortest run from the first state to this one."""
        found = [state]
        while found[-1]:
            found.append(self.parents[found[-1]])
        return found[::-1]


def explore(graph: Graph, most: int, progress: Callable[[Graph], None] = lambda graph: None) -> None:
    """Expand states until all are, a rule is broken, or there are `most`."""
    codec = Codec(graph.world)
    if not graph.keys:
        graph.number(graph.symmetry.canonical(codec.first())[0], 0)
    while not graph.complete and graph.broken is None and len(graph.keys) < most:
        _expand(graph, codec, graph.expanded)
        if graph.expanded & 1023 == 0:
            progress(graph)


def _expand(graph: Graph, codec: Codec, state: int) -> None:
    world, key = graph.world, graph.keys[state]
    node = codec.load(key)
    try:
        rules.check(node)
    except InvariantBroken as error:
        graph.broken = state, None, str(error)
        return
    graph.hungry.append(_bits(node, waits_for_rollout))
    graph.asking.append(_bits(node, waits_for_lease))
    fresh = True
    for move in moves.enabled(world, node):
        if move.kind == "tick":
            later = codec.ticked(key)
            if later != key:
                graph.edge(later, state, move.fair)
            continue
        if not fresh:
            node = codec.load(key)
        try:
            moves.apply(world, node, move)
            found = codec.pack(node)
        except InvariantBroken as error:
            graph.broken = state, move, str(error)
            return
        fresh = False
        graph.edge(found, state, FAULT if move.cost else move.fair)
    graph.first_out.append(len(graph.targets))


def _bits(node: Node, waits: Callable[[Node, int], bool]) -> int:
    bits = 0
    for number in range(len(node.books)):
        if waits(node, number):
            bits |= 1 << number
    return bits


# --- a search that goes on another day --------------------------------------------------------------------


class Saved(msgspec.Struct, array_like=True):
    """A search in a file (MessagePack): the arrays as they lie in memory."""

    version: int
    of: str
    keys: list[bytes]
    arrays: list[bytes]


VERSION = 2
ARRAYS = ("parents", "first_out", "targets", "classes", "turns", "hungry", "asking")


def save(graph: Graph, file: Path) -> None:
    """Write the search so far, without a state that was only half expanded; a crash in between leaves the old file."""
    known, edges = graph.expanded, graph.first_out[-1]
    whole = {"targets": edges, "classes": edges, "turns": edges, "hungry": known, "asking": known}
    arrays = [getattr(graph, name)[: whole.get(name)].tobytes() for name in ARRAYS]
    new = file.with_name(file.name + ".new")
    new.write_bytes(msgspec.msgpack.encode(Saved(VERSION, repr(tuple(graph.world)), graph.keys, arrays)))
    new.replace(file)


def resume(world: World, file: Path) -> Graph:
    """Read a saved search. Raises ConfigError if it is of another world, or no such file at all."""
    try:
        saved = msgspec.msgpack.decode(file.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(str(file), f"is no saved search: {error}") from None
    if (saved.version, saved.of) != (VERSION, repr(tuple(world))):
        raise ConfigError(str(file), "is the search of another world", "name another file, or the same options")
    graph = Graph(world)
    graph.keys = saved.keys
    graph.numbers = {key: number for number, key in enumerate(graph.keys)}
    for name, data in zip(ARRAYS, saved.arrays, strict=True):
        found = getattr(graph, name)
        del found[:]
        found.frombytes(data)
    return graph
