"""From a world to a verdict: expand, look for waits that may never end, expand more."""

from collections.abc import Callable
from typing import NamedTuple

from core.verify.liveness import first_stuck
from core.verify.search import Graph, explore
from core.verify.story import tell_broken, tell_stuck
from core.verify.symmetry import Unfolded

FIRST_LOOK = 4_000
"""States before the first search for endless waits; then at every doubling, so that a deadlock is found early."""

PROVED, BROKEN, STUCK, UNFINISHED = "proved", "broken", "stuck", "unfinished"


class Verdict(NamedTuple):
    outcome: str
    states: int
    transitions: int
    story: list[str]
    """The shortest run to what went wrong; empty if nothing did."""


def prove(graph: Graph, most: int, progress: Callable[[Graph], None] = lambda graph: None) -> Verdict:
    """Walk the whole graph, or as much of it as `most` states, or up to the first thing that is wrong."""
    look = max(FIRST_LOOK, 2 * graph.expanded)
    while True:
        explore(graph, min(look, most), progress)
        turned = len(graph.symmetry.orders) > 1
        stuck = first_stuck(Unfolded(graph) if turned else graph) if graph.broken is None else None
        if turned and (stuck is not None or graph.broken is not None):
            return _named(graph, most, progress)
        if graph.broken is not None:
            return _verdict(graph, BROKEN, tell_broken(graph))
        if stuck is not None:
            return _verdict(graph, STUCK, tell_stuck(graph, stuck))
        if graph.complete:
            return _verdict(graph, PROVED, [])
        if look >= most:
            return _verdict(graph, UNFINISHED, [])
        look *= 2


def _named(graph: Graph, most: int, progress: Callable[[Graph], None]) -> Verdict:
    """Something is wrong in a graph of orbits, where nobody has a name: find it again in the whole one, and tell it."""
    world = graph.world._replace(symmetry=False)
    return prove(Graph(world), most * len(graph.symmetry.orders), progress)


def _verdict(graph: Graph, outcome: str, story: list[str]) -> Verdict:
    return Verdict(outcome, len(graph.keys), len(graph.targets), story)
