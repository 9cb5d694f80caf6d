"""Nobody waits for ever: two questions about a graph, asked for each pipeline.

1. *Doomed*: is there a state in which it waits and from which, if nothing more goes wrong, no way leads to its being
   served? (L2; the answer is a state.)
2. *Starved*: is there a way to go on for ever, fair to every move that stays possible, on which it waits throughout?
   (L1, L3; the answer is a set of states that can be gone round in for ever.)

A graph that is not complete yet gets the benefit of the doubt: what was not expanded ends every wait. So what is found
there is true, and only the answer "none" needs the whole graph.

Weak fairness: of each class of moves, on a run that goes on for ever, either one happens again and again, or they are
impossible again and again. It is enough to look at strongly connected sets of states: one of them holds such a run if
and only if every class has a move inside it or a state where it is impossible.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from core.verify.moves import CLASSES, COMPLETES, OPERATES, UNFAIR
from core.verify.search import FAULT
from core.verify.search import Graph as Whole
from core.verify.symmetry import Unfolded

Graph = Whole | Unfolded


class Wait(NamedTuple):
    """One way of waiting, of one pipeline."""

    pipeline: int
    lease: bool
    """For a lease; else for a completed trajectory."""


class Stuck(NamedTuple):
    """A wait that may never end."""

    wait: Wait
    state: int
    """The first state of it on a shortest run."""
    cycle: tuple[int, ...]
    """States to go through again and again, from `state` back to it; empty: it is doomed."""


def waits(graph: Graph) -> list[Wait]:
    return [Wait(number, lease) for number in graph.asked for lease in (False, True)]


def first_stuck(graph: Graph) -> Stuck | None:
    """The first wait that may never end; None: there is none (among what was expanded)."""
    for wait in waits(graph):
        doomed = _doomed(graph, wait, _waiting(graph, wait))
        if doomed is not None:
            return Stuck(wait, doomed, ())
    for wait in waits(graph):
        found = _starved(graph, wait)
        if found is not None:
            return found
    return None


def _waiting(graph: Graph, wait: Wait) -> bytearray:
    """For each state, whether the pipeline waits there."""
    return bytearray(bits >> wait.pipeline & 1 for bits in (graph.asking if wait.lease else graph.hungry))


def _serves(wait: Wait) -> frozenset[int]:
    """Classes of moves that end the wait, besides those that lead out of it."""
    first = wait.pipeline * CLASSES + COMPLETES
    return frozenset() if wait.lease else frozenset(range(first, first + OPERATES - COMPLETES))


# --- doomed -------------------------------------------------------------------------------------------


def _doomed(graph: Graph, wait: Wait, waiting: bytearray) -> int | None:
    """The first state from which the wait cannot end any more without another fault.

    Backwards from wherever it ends; states have few ways in, so sweeping from the last found to the first, again and
    again, needs little more memory than a bit a state.
    """
    serving = _serves(wait)
    safe = bytearray(1 - bit for bit in waiting)
    known = len(safe)
    first, targets, classes = graph.first_out, graph.targets, graph.classes
    rest = [state for state in range(len(safe) - 1, -1, -1) if not safe[state]]
    while rest:
        left = []
        for state in rest:
            for edge in range(first[state], first[state + 1]):
                kind = classes[edge]
                if kind != FAULT and (targets[edge] >= known or safe[targets[edge]] or kind in serving):
                    safe[state] = 1
                    break
            else:
                left.append(state)
        if len(left) == len(rest):
            return min(left)
        rest = left
    return None


# --- starved --------------------------------------------------------------------------------------------


def _starved(graph: Graph, wait: Wait) -> Stuck | None:
    inside = _waiting(graph, wait)
    serving = _serves(wait)
    for component in _components(graph, inside, serving):
        walk = _Round(graph, component, serving)
        if walk.fair:
            cycle = walk.states()
            return Stuck(wait, cycle[0], tuple(cycle))
    return None


def _edges(graph: Graph, state: int, serving: frozenset[int]) -> Iterator[tuple[int, int]]:
    for target, kind in graph.out(state):
        if kind != FAULT and kind not in serving:
            yield target, kind


def _components(graph: Graph, inside: bytearray, serving: frozenset[int]) -> Iterator[list[int]]:
    """Strongly connected components with at least one transition (Tarjan's algorithm, without recursion)."""
    order = array("I", bytes(4 * len(inside)))
    low = array("I", bytes(4 * len(inside)))
    known = len(inside)
    stacked = bytearray(known)
    stack: list[int] = []
    count = 0
    for root in range(len(inside)):
        if not inside[root] or order[root]:
            continue
        count += 1
        order[root] = low[root] = count
        stack.append(root)
        stacked[root] = 1
        work = [(root, _edges(graph, root, serving))]
        while work:
            state, edges = work[-1]
            for target, _ in edges:
                if target >= known or not inside[target]:
                    continue
                if not order[target]:
                    count += 1
                    order[target] = low[target] = count
                    stack.append(target)
                    stacked[target] = 1
                    work.append((target, _edges(graph, target, serving)))
                    break
                if stacked[target] and order[target] < low[state]:
                    low[state] = order[target]
            else:
                work.pop()
                if work and low[state] < low[work[-1][0]]:
                    low[work[-1][0]] = low[state]
                if low[state] == order[state]:
                    component = _pop(stack, stacked, state)
                    if len(component) > 1 or any(target == state for target, _ in _edges(graph, state, serving)):
                        yield component


def _pop(stack: list[int], stacked: bytearray, root: int) -> list[int]:
    found = []
    while True:
        state = stack.pop()
        stacked[state] = 0
        found.append(state)
        if state == root:
            return found


class _Round:
    """Whether a component can be gone round in fairly, and how."""

    def __init__(self, graph: Graph, component: list[int], serving: frozenset[int]) -> None:
        self.serving = serving
        self.graph = graph
        self.within = dict.fromkeys(sorted(component))
        self.taken: dict[int, tuple[int, int]] = {}
        """For each class that moves inside, one such transition."""
        self.idle: dict[int, int] = {}
        """For each class that is impossible somewhere inside, one such state."""
        possible = {kind: None for state in self.within for kind in self._classes(state)}
        for state in self.within:
            here = self._classes(state)
            for kind in possible:
                if kind not in here:
                    self.idle.setdefault(kind, state)
            for target, kind in _edges(graph, state, serving):
                if kind != UNFAIR and target in self.within:
                    self.taken.setdefault(kind, (state, target))
        self.possible = list(possible)

    def _classes(self, state: int) -> dict[int, None]:
        """Fairness classes with a move from here, the serving ones included: not taking these for ever is unfair."""
        return {kind: None for _, kind in self.graph.out(state) if kind not in (FAULT, UNFAIR)}

    @property
    def fair(self) -> bool:
        return all(kind in self.taken or kind in self.idle for kind in self.possible)

    def states(self) -> list[int]:
        """A closed walk, from the first state of the component back to it, that is fair to everyone."""
        walk = [next(iter(self.within))]
        for kind in self.possible:
            if kind in self.idle:
                walk += self._way(walk[-1], self.idle[kind])
            else:
                source, target = self.taken[kind]
                walk += [*self._way(walk[-1], source), target]
        if len(walk) == 1:
            walk += next([target] for target, _ in _edges(self.graph, walk[0], self.serving) if target in self.within)
        return walk + self._way(walk[-1], walk[0])

    def _way(self, start: int, end: int) -> list[int]:
        """A shortest way inside, without its first state."""
        came: dict[int, int] = {start: start}
        queue = [start]
        for state in queue:
            if state == end:
                break
            for target, _ in _edges(self.graph, state, self.serving):
                if target in self.within and target not in came:
                    came[target] = state
                    queue.append(target)
        way = []
        while end != start:
            way.append(end)
            end = came[end]
        return way[::-1]
