"""A counterexample in words: the shortest run to it, told by a scheduler that was never packed.

The graph remembers states, not moves. So the run is found again, on real objects with real numbers: at each state, the
move whose result packs to the next state's bytes. That this works at each step is also a check of the packing.
"""

import copy
from collections.abc import Iterator

from core.scheduler import Decision
from core.verify import client, moves
from core.verify.liveness import Stuck
from core.verify.node import Node
from core.verify.packing import Codec
from core.verify.search import Graph
from core.verify.world import World, admitted
from core.waits import explain

MOST_CYCLE = 60
"""Steps of a cycle that are told."""

WORDS = {
    "tick": "time passes: residences and turns may end, and ageing outweighs priority",
    "review": "the review timer rings", "memory": "memory of GPU {who} is seen free",
    "memory_missing": "memory of GPU {who} is not seen free within its limit",
    "given_up": "GPU {who} stays in quarantine beyond its limit",
    "complete": "{p} completes a trajectory on engine {p}/{rank}",
    "complete_late": "{p} completes a trajectory on engine {p}/{rank}, which is going to sleep",
    "stopped": "the workers of {p} are stopped", "dies": "FAULT: engine {p}/{rank} dies",
    "trainer_fails": "FAULT: the trainer of {p} fails", "overdue": "FAULT: {p} holds its lease longer than its limit",
    "lost": "FAULT: the client of {p} is lost", "cancels": "FAULT: {p} cancels its request, to ask again",
    "leaves": "FAULT: {p} leaves early",
}  # fmt: skip


def in_words(world: World, node: Node, move: moves.Move) -> str:
    """What a move is, told before it happens."""
    who = f"p{move.who + 1}"
    action, _ = node.state.operations.get(move.number, (None, None))
    what = f"{type(action).__name__} of {who}" + (f"/{move.rank}" if move.rank >= 0 else "")
    match move.kind:
        case "say":
            word = client.next_word(world, node, move.who)
            assert word is not None
            return f"{who} {client.SAYS[word]}"
        case "done":
            return f"{what} is done"
        case "fails":
            return f"FAULT: {what} fails"
        case "unanswered":
            return f"FAULT: {what} is done, but gives no answer"
    fault = "FAULT: " if move.cost and move.kind == "memory_missing" else ""
    return fault + WORDS[move.kind].format(p=who, who=move.who, rank=move.rank)


class Telling:
    """Goes along a run of packed states with a node that was never packed."""

    def __init__(self, graph: Graph) -> None:
        self.world = graph.world
        self.graph = graph
        self.codec = Codec(graph.world)
        self.node = Node(admitted(graph.world))
        self.node.faults = graph.world.faults
        self.steps = 0

    def along(self, states: list[int]) -> Iterator[str]:
        """The lines of a run; `states` begins with where the node is."""
        for target in states[1:]:
            yield from self._step(self.graph.keys[target])

    def _step(self, key: bytes) -> Iterator[str]:
        for move in moves.enabled(self.world, self.node):
            text = in_words(self.world, self.node, move)
            after = copy.deepcopy(self.node)
            decision = moves.apply(self.world, after, move)
            if self.codec.pack(after) == key:
                self.node = after
                yield from self._told(text, decision)
                return
        raise AssertionError("the packed run cannot be followed: something that matters is not packed")

    def _told(self, text: str, decision: Decision | None) -> Iterator[str]:
        self.steps += 1
        yield f"{self.steps:4}. {text}"
        if decision is not None:
            yield from (f"        {note.kind}: {note.text}" for note in decision.notes)
            yield from (f"        refused: {reply.error}" for reply in decision.replies if reply.error is not None)

    def last(self, move: moves.Move) -> Iterator[str]:
        """The move that broke a rule."""
        self.steps += 1
        yield f"{self.steps:4}. {in_words(self.world, self.node, move)}"


def tell_broken(graph: Graph) -> list[str]:
    """The shortest run to the first broken rule, and the rule."""
    assert graph.broken is not None
    state, move, why = graph.broken
    telling = Telling(graph)
    lines = list(telling.along(graph.path(state)))
    if move is not None:
        lines += telling.last(move)
    return [*lines, f"broken: {why}"]


def tell_stuck(graph: Graph, stuck: Stuck) -> list[str]:
    """The shortest run to a wait that may never end, and why it does not."""
    telling = Telling(graph)
    lines = list(telling.along(graph.path(stuck.state)))
    who = f"p{stuck.wait.pipeline + 1}"
    what = "a lease" if stuck.wait.lease else "a rollout engine to complete a trajectory on"
    if not stuck.cycle:
        lines.append(f"from here on, whatever happens, {who} never gets {what}:")
    else:
        lines.append(f"from here on, {who} may wait for {what} for ever, while this goes round and round:")
        shown = list(stuck.cycle[: MOST_CYCLE + 1])
        lines += telling.along(shown)
        if len(shown) < len(stuck.cycle):
            lines.append(f"      ... {len(stuck.cycle) - len(shown)} more steps")
    return [*lines, *explain(telling.node.state).splitlines()]
