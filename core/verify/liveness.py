"""Nobody waits for ever: two questions about a complete graph, asked for each pipeline.

1. *Doomed*: is there a state in which it waits and from which, if nothing more goes wrong, no way leads to its being
   served? (L2; the answer is a state.)
2. *Starved*: is there a way to go on for ever, fair to every move that stays possible, on which it waits throughout?
   (L1, L3; the answer is a set of states that can be gone round in for ever.)

Weak fairness: of each class of moves, on a run that goes on for ever, either one happens again and again, or they are
impossible again and again. It is enough to look at strongly connected sets of states: one of them holds such a run if
and only if every class has a move inside it or a state where it is impossible.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from core.verify.moves import CLASSES, COMPLETES, OPERATES, UNFAIR
from core.verify.search import FAULT, Graph


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
    """States that can be gone through again and again, back to `state`; empty: it is doomed."""


def waits(graph: Graph) -> list[Wait]:
    return [Wait(number, lease) for number in range(graph.world.pipelines) for lease in (False, True)]


def first_stuck(graph: Graph) -> Stuck | None:
    """The first wait that may never end; None: there is none. The graph must be complete."""
    assert graph.complete, "the search has not seen everything"
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
    first, targets, classes = graph.first_out, graph.targets, graph.classes
    rest = [state for state in range(len(safe) - 1, -1, -1) if not safe[state]]
    while rest:
        left = []
        for state in rest:
            for edge in range(first[state], first[state + 1]):
                kind = classes[edge]
                if kind != FAULT and (safe[targets[edge]] or kind in serving):
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
        cycle = _fair(graph, component, serving)
        if cycle:
            return Stuck(wait, min(component), cycle)
    return None


def _edges(graph: Graph, state: int, serving: frozenset[int]) -> Iterator[tuple[int, int]]:
    for target, kind in graph.out(state):
        if kind != FAULT and kind not in serving:
            yield target, kind


def _components(graph: Graph, inside: bytearray, serving: frozenset[int]) -> Iterator[list[int]]:
    """Strongly connected components with at least one transition (Tarjan's algorithm, without recursion)."""
    order = array("I", bytes(4 * len(inside)))
    low = array("I", bytes(4 * len(inside)))
    stacked = bytearray(len(inside))
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
                if not inside[target]:
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


def _fair(graph: Graph, component: list[int], serving: frozenset[int]) -> tuple[int, ...]:
    """States of a component in an order in which it can be gone round in fairly; empty: there is none.

    Served on the way means that a class of the served kind is never *taken*; if it is possible throughout, not taking
    it for ever is unfair.
    """
    within = dict.fromkeys(component)
    always: dict[int, None] | None = None
    taken: dict[int, None] = {}
    for state in component:
        here: dict[int, None] = {}
        for target, kind in graph.out(state):
            if kind in (FAULT, UNFAIR):
                continue
            here[kind] = None
            if target in within and kind not in serving:
                taken[kind] = None
        always = here if always is None else {kind: None for kind in always if kind in here}
    if always and any(kind not in taken for kind in always):
        return ()
    return tuple(component)
