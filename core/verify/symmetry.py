"""States that differ only in which of several like pipelines is which are one state.

Pipelines are interchangeable if their declarations differ in the name alone; then `decide` treats them alike, because
instants are distinct and ties of every other kind go to whoever is hungry for longer, not to whoever registered first
(tests/test_verify.py permutes, decides, and compares, byte by byte). GPUs are *not* interchangeable, even where
everybody may use all of them: of two that are as good the scheduler takes the one with the lower number, and trainers
and engines are bound to theirs. Nor are pipelines whose trainers lie on different GPUs, or that start one after another
(`Start.INCIDENT`).

The search keeps one state of each orbit and, with each transition, the permutation that leads from the state found to
the one kept. Safety is checked on those. Whether a pipeline waits for ever is a question about one pipeline, and
fairness one about everybody's moves, so there it must be known who is who: `unfold` turns the graph of orbits into that
of all (state, permutation), which has the runs of the whole graph, from integers alone.
"""

from array import array
from collections.abc import Iterator
from itertools import permutations, product
from typing import TYPE_CHECKING

from core.verify.layout import ENGINE, HEAD, START, WATCHED, batches
from core.verify.moves import CLASSES
from core.verify.world import Start, World, specs

if TYPE_CHECKING:
    from core.verify.search import Graph

Order = tuple[int, ...]
"""A permutation: which pipeline takes each place."""


class Symmetry:
    """The interchangeable pipelines of a world, and what permuting them does to a packed state."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engines = [spec.infer.size for spec in specs(world)]
        self._alike = _alike(world)
        self.orders: list[Order] = _orders(world, self._alike)
        """Every permutation; the first changes nothing."""
        others = {number for places in self._alike for number in places[1:]}
        self.representatives = [number for number in range(world.pipelines) if number not in others]
        """One pipeline of each kind; what holds for it holds for those like it."""
        self.numbers = {order: number for number, order in enumerate(self.orders)}

    def canonical(self, key: bytes) -> tuple[bytes, int]:
        """The one state that stands for the orbit, and the number of the permutation that leads to it."""
        if len(self.orders) == 1:
            return key, 0
        books, gpus, dues = self._parts(key)
        latest = {code & 63: place for place, code in enumerate(dues)}
        order = list(range(self._world.pipelines))
        for places in self._alike:
            ranked = sorted(places, key=lambda number: (books[number], latest.get(number, -1), number))
            for place, number in zip(places, ranked, strict=True):
                order[place] = number
        found = self.numbers[tuple(order)]
        return (self._join(key, books, gpus, dues, self.orders[found]) if found else key), found

    def permuted(self, key: bytes, order: Order) -> bytes:
        """The same state with pipeline `order[i]` in place i."""
        return self._join(key, *self._parts(key), order)

    def _parts(self, key: bytes) -> tuple[list[bytes], bytes, bytes]:
        """What a packed state says of each pipeline, of the GPUs, and of who is due when."""
        place, books = START, []
        for engines in self._engines:
            end = place + HEAD + batches(key, place) + ENGINE * engines
            books.append(key[place:end])
            place = end
        first = place
        for _ in range(self._world.gpus):
            place += 2 if key[place] & 7 in WATCHED else 1
        return books, key[first:place], key[place:]

    @staticmethod
    def _join(key: bytes, books: list[bytes], gpus: bytes, dues: bytes, order: Order) -> bytes:
        place_of = {number: place for place, number in enumerate(order)}
        out = bytearray(key[:START])
        for number in order:
            out += books[number]
        codes = iter(gpus)
        for code in codes:
            out.append(code)
            if code & 7 in WATCHED:
                more = next(codes)
                out.append(more & 240 | place_of[more & 15])
        out += bytes([code & 192 | place_of[code & 63] for code in dues])
        return bytes(out)


def _alike(world: World) -> list[list[int]]:
    """Places of pipelines that differ in their names alone."""
    if not world.symmetry or world.start is not Start.FREE:
        return []
    found: dict[tuple, list[int]] = {}
    for number, spec in enumerate(specs(world)):
        found.setdefault((spec.groups, spec.staleness), []).append(number)
    return [places for places in found.values() if len(places) > 1]


def _orders(world: World, alike: list[list[int]]) -> list[Order]:
    orders = []
    for choice in product(*[permutations(places) for places in alike]):
        order = list(range(world.pipelines))
        for places, taken in zip(alike, choice, strict=True):
            for place, number in zip(places, taken, strict=True):
                order[place] = number
        orders.append(tuple(order))
    return orders


class Unfolded:
    """A graph of orbits, unfolded; what `core.verify.liveness` asks of a graph.

    State `number * len(orders) + g` is the kept state `number` in whose place i the pipeline `orders[g][i]` is.
    """

    def __init__(self, graph: "Graph") -> None:
        symmetry = graph.symmetry
        self.world = graph.world
        self.asked = symmetry.representatives
        self._orders = symmetry.orders
        after = [[symmetry.numbers[tuple(g[i] for i in turn)] for turn in self._orders] for g in self._orders]
        classes = [self._classes(order) for order in self._orders]
        bits = [self._bits(order) for order in self._orders]
        size = len(self._orders)
        self.first_out, self.targets, self.classes = array("Q", [0]), array("I"), array("B")
        self.hungry, self.asking = array("B"), array("B")
        for state in range(graph.expanded):
            edges = range(graph.first_out[state], graph.first_out[state + 1])
            for g in range(size):
                self.hungry.append(bits[g][graph.hungry[state]])
                self.asking.append(bits[g][graph.asking[state]])
                self.targets.extend([graph.targets[edge] * size + after[g][graph.turns[edge]] for edge in edges])
                self.classes.extend([classes[g][graph.classes[edge]] for edge in edges])
                self.first_out.append(len(self.targets))

    def _classes(self, order: Order) -> list[int]:
        """The fairness class of a move, by its class in a state whose places are taken so."""
        pipelines = [number * CLASSES + kind for number in order for kind in range(CLASSES)]
        return pipelines + list(range(len(pipelines), 256))

    @staticmethod
    def _bits(order: Order) -> list[int]:
        return [
            sum(1 << number for place, number in enumerate(order) if bits >> place & 1)
            for bits in range(1 << len(order))
        ]

    def out(self, state: int) -> Iterator[tuple[int, int]]:
        """Transitions of an expanded state: (target, class)."""
        for edge in range(self.first_out[state], self.first_out[state + 1]):
            yield self.targets[edge], self.classes[edge]
