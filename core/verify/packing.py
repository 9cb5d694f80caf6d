"""A state as a few dozen bytes, and back: the canonical form, in which numbers are renumbered by order.

`pack` reads a node, whatever its numbers; `load` writes a node in canonical numbers into one scratch state, which is
reused (`loading`): the search copies bytes, never objects. Two nodes that pack to the same bytes behave alike (see
`world` for what is left out on purpose). What is not packed: texts, the `since` of anything (for people only), outcomes
that nobody waits for any more (`decide` ignores them: `moves` makes sure), and whatever follows from the rest.
"""

from core import actions
from core.errors import InvariantBroken
from core.ledger import UP, EngineState, Gpu, Hold, Lease, PipelineBook
from core.model import DemandPolicy
from core.state import Clearing, State
from core.turns import rests_until
from core.verify.layout import (
    AGEING,
    ASLEEP,
    ENGINE,
    HEAD,
    HUNGER,
    NO_AGE,
    NO_LAG,
    NOTHING,
    OPERATION_CODE,
    PHASE_CODE,
    START,
    STATE_CODE,
    UNUSED,
    WATCHED,
    batches,
)
from core.verify.loading import Loader
from core.verify.node import Node
from core.verify.world import OLDEST, TICK, World, admitted

NO_ORDER: dict[int, int] = {}


class Codec:
    """Packs and loads the nodes of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.node = Node(admitted(world))
        """The scratch node that `load` writes."""
        self._books = self.node.books
        self._index = {book.id: number for number, book in enumerate(self._books)}
        self._quarantines = [f"quarantine/{gpu}" for gpu in range(world.gpus)]
        self._signals = world.demand is not DemandPolicy.BATCH
        self.load = Loader(world, self.node).load
        """Write a packed state into the scratch node, which is valid until the next load."""

    def first(self) -> bytes:
        """The state in which everybody is admitted."""
        node = Node(admitted(self.world))
        node.faults = self.world.faults
        return self.pack(node)

    def pack(self, node: Node) -> bytes:
        state = node.state
        tick = node.now // TICK
        today = tick * TICK
        review = 0
        if state.review_at >= 0:
            review = 1 + max(0, state.review_at // TICK - tick)
        out = [node.faults, review, node.dregs]
        dues: list[tuple[int, int]] = []
        for number, book in enumerate(node.books):
            self._pack_book(out, node, number, book)
            self._pack_engines(out, state, book, tick)
            since = book.hungry_since
            if since >= 0:
                dues.append((since + HUNGER, number if since >= today else number | 128))
            if book.requests:
                for request in book.requests.values():
                    dues.append((request.due, number | 64 if request.filed_at >= today else number | 192))
        for gpu in state.ledger.gpus:
            hold = gpu.hold
            if hold is Hold.CLEARING or hold is Hold.QUARANTINED:
                out += self._pack_clearing(state, gpu)
            else:
                out.append((hold is Hold.HELD) | gpu.given_up << 3)  # no node leaves, so none is lost
        dues.sort()
        for _, code in dues:
            out.append(code)
        if state.dirty or state.dirty_gpus or state.replan or state.failing or state.ledger.unpromised:
            raise InvariantBroken("something changed and was not planned for")
        return bytes(out)

    def _pack_book(self, out: list[int], node: Node, number: int, book: PipelineBook) -> None:
        held = asked = clearing = 0
        if book.leases or book.requests:
            held, asked = self._wants(book)
        if book.clearing:
            for gpu in book.clearing:
                clearing |= 1 << gpu
        stop = 0 if not book.stop else 1 if book.stop > 0 else 2
        rests = book.gave_way_at >= 0 and rests_until(book, book.gave_way_at) > node.now
        active, opened = node.active[number], book.batches
        out += (
            node.at[number] | book.allocation << 4 | (book.published >= 0) << 5 | (book in node.state.unmet) << 6
            | rests << 7,
            PHASE_CODE[book.phase] | stop << 3 | book.releasing << 5 | book.leave_asked << 6 | book.degraded << 7,
            held,
            asked | len(opened) << 5,
            self._said(book) if self._signals else 0,
            active & 255,
            active >> 8,
            clearing,
        )
        for batch in opened.values():
            out.append(batch.delivered)

    @staticmethod
    def _wants(book: PipelineBook) -> tuple[int, int]:
        """What it holds, and what it asks for: at most one of the two, and once."""
        held = asked = 0
        for lease in book.leases.values():
            held += 1 + lease.priority
        for request in book.requests.values():
            asked += 1 + request.priority | request.promised << 4
        if len(book.leases) + len(book.requests) > 1:
            raise InvariantBroken(f"{book.id} has more than one lease or request")
        return held, asked

    @staticmethod
    def _said(book: PipelineBook) -> int:
        return book.signal | (0 if book.reported is None else 1 + book.reported) << 1

    def _pack_engines(self, out: list[int], state: State, book: PipelineBook, tick: int) -> None:
        promised, unserving = state.ledger.promised, state.ledger.unserving
        order = self._order(book) if len(book.up) > 1 else NO_ORDER
        for rank, engine in enumerate(book.engines):
            where, deaths = engine.state, engine.deaths
            if where is EngineState.ASLEEP and not (engine.operation or deaths or engine.strikes or engine.disabled):
                if engine in promised:
                    out += (ASLEEP, NOTHING | 64, 0, order.get(rank, 0))
                else:
                    out += UNUSED
                continue
            operation = detail = 0
            if engine.operation:
                operation, detail = self._operation(book, state.operations[engine.operation][0])
            age, lag, done = NO_AGE, NO_LAG, engine.completed > 0
            if where in UP:
                lag = self._lag(book, engine.version)
                if engine.routable_since >= 0:
                    age = min(OLDEST, tick - engine.routable_since // TICK)
            elif where is EngineState.DRAINING:
                lag = self._lag(book, engine.version)
                age = 0 if engine.routable_since >= 0 else NO_AGE
                done = done and deaths > 0
            else:
                done = done and deaths > 0
            out += (
                STATE_CODE[where] | operation << 3 | engine.routable << 6 | engine.doomed << 7,
                age | lag << 2 | done << 5 | (engine in promised) << 6 | (engine in unserving) << 7,
                detail | engine.strikes << 3 | deaths << 5 | (engine.disabled != "") << 7,
                order.get(rank, 0),
            )

    @staticmethod
    def _order(book: PipelineBook) -> dict[int, int]:
        """Of engines that have completed nothing, which served first, or was promised first: a turn may rest on it."""
        served = [(e.routable_since, rank) for rank, e in book.up.items() if e.routable_since >= 0 and not e.completed]
        served.sort()
        coming = [rank for rank, engine in book.up.items() if engine.routable_since < 0]
        order = {rank: place for place, (_, rank) in enumerate(served)} if len(served) > 1 else {}
        if len(coming) > 1:
            order.update((rank, place) for place, rank in enumerate(coming))
        return order

    def _operation(self, book: PipelineBook, action: actions.Action) -> tuple[int, int]:
        if isinstance(action, actions.WakeEngine):
            return 1, action.cold
        if isinstance(action, actions.SyncEngine):
            return 2, self._lag(book, action.version)
        return OPERATION_CODE[type(action)], 0

    def _lag(self, book: PipelineBook, version: int) -> int:
        """Versions behind, as far as it makes a difference."""
        return NO_LAG if version < 0 else min(book.published - version, self.world.staleness + 1)

    def _pack_clearing(self, state: State, gpu: Gpu) -> tuple[int, int]:
        watch = 0
        if gpu.watch in state.operations:
            clearing = state.operations[gpu.watch][1]
            assert isinstance(clearing, Clearing) and clearing.book.id == gpu.cleared_by, "watched for somebody else"
            source = clearing.source
            watch = 1 if source is None else 2 if isinstance(source, Lease) else 3 + source.dp_rank
        timed = self._quarantines[gpu.id] in state.timers
        return (
            (2 if gpu.hold is Hold.CLEARING else 3) | gpu.given_up << 3 | timed << 4,
            self._index[gpu.cleared_by] | watch << 4,
        )

    def ticked(self, key: bytes) -> bytes:
        """The state one tick later, in which nothing is different but ages: what packing it then would give."""
        out = bytearray(key)
        if out[1] > 1:
            out[1] -= 1
        place = START
        for book in self._books:
            out[place] &= 127  # whoever gave way has rested
            place += HEAD + batches(key, place)
            for _ in book.engines:
                if out[place] & 7 in AGEING and out[place + 1] & 3 < OLDEST:
                    out[place + 1] += 1
                place += ENGINE
        for _ in range(self.world.gpus):
            place += 2 if out[place] & 7 in WATCHED else 1
        for due_at in range(place, len(out)):
            out[due_at] |= 128
        return bytes(out)
