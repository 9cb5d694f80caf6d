"""From a world to a verdict: expand, look for waits that may never end, expand more."""

from collections.abc import Callable
from typing import NamedTuple

from core.verify.liveness import first_stuck
from core.verify.search import Graph, explore
from core.verify.story import tell_broken, tell_stuck

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
        if graph.broken is not None:
            return _verdict(graph, BROKEN, tell_broken(graph))
        stuck = first_stuck(graph)
        if stuck is not None:
            return _verdict(graph, STUCK, tell_stuck(graph, stuck))
        if graph.complete:
            return _verdict(graph, PROVED, [])
        if look >= most:
            return _verdict(graph, UNFINISHED, [])
        look *= 2


def _verdict(graph: Graph, outcome: str, story: list[str]) -> Verdict:
    return Verdict(outcome, len(graph.keys), len(graph.targets), story)
