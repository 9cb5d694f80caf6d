"""A state as a few dozen bytes, and back: the canonical form, in which numbers are renumbered by order.

`pack` reads a node, whatever its numbers; `load` writes a node in canonical numbers into one scratch state, which is
reused: the search copies bytes, never objects. Two nodes that pack to the same bytes behave alike (see `world` for
what is left out on purpose). What is not packed: texts, the `since` of anything (for people only), outcomes that
nobody waits for any more (`decide` ignores them), and whatever follows from the rest.
"""

from core import actions
from core.actions import Emptying
from core.demand import due
from core.errors import InvariantBroken
from core.ledger import UP, Engine, EngineState, Gpu, Hold, Lease, Phase, PipelineBook, Request
from core.model import BatchState, DemandPolicy, Priority, Role
from core.regions import Regions
from core.state import Clearing, State
from core.turns import rests_until
from core.verify.node import Node
from core.verify.world import OLDEST, TICK, World, admitted

PHASES = tuple(Phase)
STATES = tuple(EngineState)
PRIORITIES = tuple(Priority)
HOLDS = tuple(Hold)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}
STATE_CODE = {state: code for code, state in enumerate(STATES)}
OPERATIONS = (
    None, actions.WakeEngine, actions.SyncEngine, actions.OpenGate, actions.SleepEngine, actions.KillEngine
)  # fmt: skip
OPERATION_CODE = {kind: code for code, kind in enumerate(OPERATIONS) if kind is not None}

# Canonical numbers. Any would do; these leave room for what comes before.
NOW_TICK = 20
COUNT = 50
"""Latest batch opened and request filed, by each pipeline."""
VERSION = 9
NO_AGE = 3
NO_LAG = 7

HEAD = 8
"""Bytes of a pipeline before its batches; `ENGINE`: of an engine."""
ENGINE = 4

# The first two bytes of an engine that is asleep.
ASLEEP = STATE_CODE[EngineState.ASLEEP]
NOTHING = NO_AGE | NO_LAG << 2
AGEING = frozenset(STATE_CODE[state] for state in UP)
WATCHED = frozenset((HOLDS.index(Hold.CLEARING), HOLDS.index(Hold.QUARANTINED)))
UNUSED = (ASLEEP, NOTHING, 0, 0)
NO_ORDER: dict[int, int] = {}
HUNGER = due(0, Priority.GENERATION)

# Numbers of actions in flight: one at a time for each engine, GPU, and pipeline.
STOP, MEMORY, FIRST_ENGINE, NEXT = 1, 20, 30, 200


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
        self._regions: dict[int, Regions] = {}
        """By which pipelines live."""
        # What a few bytes mean is worked out once.
        self._heads: list[dict[bytes, tuple]] = [{} for _ in self._books]
        self._engines: list[dict[bytes, tuple]] = [{} for _ in range(8 * len(self._books))]
        self._batches: dict[bytes, dict[int, BatchState]] = {}
        self._memory = [actions.AwaitMemory(action=MEMORY + gpu, gpus=(gpu,), need=(0,)) for gpu in range(world.gpus)]

    def first(self) -> bytes:
        """The state in which everybody is admitted."""
        node = Node(admitted(self.world))
        node.faults = self.world.faults
        return self.pack(node)

    # --- pack ------------------------------------------------------------------------------------------

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
        active, batches = node.active[number], book.batches
        out += (
            node.at[number] | book.allocation << 4 | (book.published >= 0) << 5 | (book in node.state.unmet) << 6
            | rests << 7,
            PHASE_CODE[book.phase] | stop << 3 | book.releasing << 5 | book.leave_asked << 6 | book.degraded << 7,
            held,
            asked | len(batches) << 5,
            self._said(book) if self._signals else 0,
            active & 255,
            active >> 8,
            clearing,
        )
        for batch in batches.values():
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
        place = 3
        for book in self._books:
            out[place] &= 127  # whoever gave way has rested
            place += HEAD + (out[place + 3] >> 5)
            for _ in book.engines:
                if out[place] & 7 in AGEING and out[place + 1] & 3 < OLDEST:
                    out[place + 1] += 1
                place += ENGINE
        for _ in range(self.world.gpus):
            place += 2 if out[place] & 7 in WATCHED else 1
        for due_at in range(place, len(out)):
            out[due_at] |= 128
        return bytes(out)

    # --- load ------------------------------------------------------------------------------------------

    def load(self, key: bytes) -> Node:
        """Write the state into the scratch node, which is valid until the next load."""
        node = self.node
        state = node.state
        ledger = state.ledger
        node.now = ledger.now = NOW_TICK * TICK + 40
        node.faults, review, node.dregs = key[0], key[1], key[2]
        self._reset(state)
        if review:
            state.review_at = (NOW_TICK + review - 1) * TICK
            state.timers["review"] = 1
        place = 3
        alive = 0
        for number, book in enumerate(self._books):
            place = self._load_book(node, number, book, key, place)
            place = self._load_engines(state, number, book, key, place)
            alive |= book.alive << number
        for gpu in ledger.gpus:
            code = key[place]
            gpu.hold = HOLDS[code & 7]
            gpu.given_up = code & 8 > 0
            gpu.watch = 0
            place += 1
            if gpu.hold is Hold.CLEARING or gpu.hold is Hold.QUARANTINED:
                self._load_clearing(state, gpu, code, key[place])
                place += 1
        if ledger.mapping_generation != alive or state.regions is not self._regions.get(alive):
            self._map(state, alive)
        if place < len(key):
            self._load_dues(key, place)
        return node

    @staticmethod
    def _reset(state: State) -> None:
        ledger = state.ledger
        state.operations, state.timers, state.unmet = {}, {}, {}
        state.dirty, state.dirty_gpus, state.replan, state.failing = {}, {}, False, []
        state.review_at = -1
        state.next_action, state.next_epoch, state.next_generation = NEXT, NEXT, 2
        ledger.waiting, ledger.leases, ledger.doomed, ledger.promised, ledger.unserving = {}, {}, {}, {}, {}
        ledger.init = None
        ledger.unpromised = {}
        for gpu in ledger.gpus:
            gpu.promised = gpu.engine = gpu.lease = None

    def _load_book(self, node: Node, number: int, book: PipelineBook, key: bytes, place: int) -> int:
        code = key[place : place + HEAD]
        head = self._heads[number].get(code)
        if head is None:
            head = self._heads[number][code] = self._head(code)
        (
            node.at[number], book.allocation, book.published, unmet, book.phase, stop, book.releasing,
            book.leave_asked, book.degraded, held, asked, batches, book.signal, book.reported, node.active[number],
            clearing, book.gave_way_at,
        ) = head  # fmt: skip
        state = node.state
        if unmet:
            state.unmet[book] = None
        book.stop = stop
        if stop > 0:
            book.stop = STOP + number
            state.operations[book.stop] = actions.StopPipeline(action=book.stop, pipeline=book.id, reason=""), book
        book.seq = 1
        book.reason = ""
        book.requests_through = book.opened_through = COUNT
        book.requests, book.leases = {}, {}
        book.clearing = dict.fromkeys(clearing)
        book.hungry_since = -1
        if held:
            self._lease(state, number, book, held)
        if asked:
            self._ask(state, book, asked)
        place += HEAD
        self._load_batches(book, key[place : place + batches])
        return place + batches

    def _head(self, code: bytes) -> tuple:
        """What the first bytes of a pipeline mean; `_load_book` says in which order."""
        first, second, held, asked, said, active, more, clearing = code
        return (
            first & 15, first & 16 > 0, VERSION if first & 32 else -1, first & 64 > 0,
            PHASES[second & 7], (0, 1, -1)[second >> 3 & 3], second & 32 > 0, second & 64 > 0, second & 128 > 0,
            held, asked & 31, asked >> 5, said & 1 > 0, (said >> 1) - 1 if said >> 1 else None, active | more << 8,
            tuple(gpu for gpu in range(self.world.gpus) if clearing >> gpu & 1), NOW_TICK * TICK if first > 127 else -1,
        )  # fmt: skip

    def _load_batches(self, book: PipelineBook, delivered: bytes) -> None:
        found = self._batches.get(delivered)
        if found is None:
            first, target = COUNT - len(delivered) + 1, self.world.target
            found = self._batches[delivered] = {
                first + i: BatchState(batch=first + i, target=target, delivered=n) for i, n in enumerate(delivered)
            }
        book.batches = dict(found)
        book.open_target = self.world.target * len(delivered)
        book.open_demand = book.planned_at = book.open_target - sum(delivered)

    def _lease(self, state: State, number: int, book: PipelineBook, held: int) -> None:
        lease = Lease(number + 1, self._request(book, held), 0)
        book.leases[lease.epoch] = state.ledger.leases[lease.epoch] = lease
        if lease.priority is Priority.INITIALIZATION:
            state.ledger.init = lease
        state.timers[f"hold/{number + 1}"] = 1
        for gpu in lease.gpus:
            state.ledger.gpus[gpu].lease = lease

    def _ask(self, state: State, book: PipelineBook, asked: int) -> None:
        ledger = state.ledger
        request = book.requests[COUNT] = self._request(book, asked)
        if not request.promised:
            ledger.waiting[request] = None
            return
        ledger.promised[request] = None
        if request.priority is Priority.INITIALIZATION:
            ledger.init = request
        for gpu in request.gpus:
            ledger.gpus[gpu].promised = request

    def _request(self, book: PipelineBook, asked: int) -> Request:
        priority = PRIORITIES[(asked & 15) - 1]
        train = book.spec.group(Role.ACTOR_TRAIN)
        assert train is not None
        gpus = book.spec.union if priority is Priority.INITIALIZATION else train.gpus
        request = Request(book, COUNT, Role.ACTOR_TRAIN, priority, gpus, 0, 0)
        request.promised = asked & 16 > 0
        return request

    def _load_engines(self, state: State, number: int, book: PipelineBook, key: bytes, place: int) -> int:
        ledger = state.ledger
        gpus = ledger.gpus
        up: dict[int, Engine] = {}
        first, ordered = place + ENGINE - 1, 0
        for rank, engine in enumerate(book.engines):
            code = key[place : place + ENGINE]
            place += ENGINE
            known = self._engines[8 * number + rank]
            found = known.get(code)
            if found is None:
                found = known[code] = self._engine(number, engine, code)
            (
                engine.state, engine.routable, engine.doomed, engine.routable_since, engine.version, engine.completed,
                engine.strikes, engine.deaths, engine.disabled, action, promised, unserving, holds, counts, order,
            ) = found  # fmt: skip
            engine.operation = 0
            if action is not None:
                engine.operation = action.action
                state.operations[action.action] = action, engine
            if promised:
                ledger.promised[engine] = None
                for gpu in engine.gpus:
                    gpus[gpu].promised = engine
            if holds:
                for gpu in engine.gpus:
                    gpus[gpu].engine = engine
            if unserving:
                ledger.unserving[engine] = None
            if engine.doomed:
                ledger.doomed[engine] = None
            if counts:
                up[rank] = engine
                ordered |= order
        if ordered:  # promised in another order than that of ranks, perhaps
            up = {rank: up[rank] for rank in sorted(up, key=lambda rank: key[first + ENGINE * rank])}
        book.up = up
        return place

    def _engine(self, number: int, engine: Engine, code: bytes) -> tuple:
        """What the bytes of an engine mean; `_load_engines` says in which order."""
        first, second, third, order = code
        state, doomed, promised = STATES[first & 7], first > 127, second & 64 > 0
        age, lag = second & 3, second >> 2 & 7
        version = -1 if lag == NO_LAG else VERSION - lag
        kind = OPERATIONS[first >> 3 & 7]
        action = None
        if kind is not None:
            action = self._engine_action(FIRST_ENGINE + 8 * number + engine.dp_rank, kind, engine, third & 7, version)
        return (
            state, first & 64 > 0, doomed, -1 if age == NO_AGE else (NOW_TICK - age) * TICK + order, version,
            second >> 5 & 1,
            third >> 3 & 3, third >> 5 & 3, "it may not be used" if third > 127 else "", action, promised, second > 127,
            state in UP or state is EngineState.DRAINING, promised or (state in UP and not doomed), order,
        )  # fmt: skip

    @staticmethod
    def _engine_action(
        action: int, kind: type[actions.Action], engine: Engine, detail: int, version: int
    ) -> actions.Action:
        who = {"action": action, "pipeline": engine.book.id, "dp_rank": engine.dp_rank, "epoch": 0}
        if kind is actions.WakeEngine:
            return actions.WakeEngine(**who, gpus=engine.gpus, cold=bool(detail))
        if kind is actions.SyncEngine:
            return actions.SyncEngine(**who, version=-1 if detail == NO_LAG else VERSION - detail)
        if kind is actions.OpenGate:
            return actions.OpenGate(**who, version=version)
        if kind is actions.SleepEngine:
            return actions.SleepEngine(**who, emptying=Emptying.ABORT)
        return actions.KillEngine(**who, reason="")

    def _load_clearing(self, state: State, gpu: Gpu, code: int, more: int) -> None:
        if code & 16:
            state.timers[self._quarantines[gpu.id]] = 1
        book = self._books[more & 15]
        gpu.cleared_by = book.id
        watch = more >> 4
        if watch:
            gpu.watch = MEMORY + gpu.id
            source = None if watch == 1 else self._over(book) if watch == 2 else book.engines[watch - 3]
            state.operations[gpu.watch] = self._memory[gpu.id], Clearing(gpu.id, book, source)

    @staticmethod
    def _over(book: PipelineBook) -> Lease:
        """A lease that is over; all that is asked of it is that it was one."""
        return Lease(0, Request(book, 0, Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING, (), 0, 0), 0)

    def _load_dues(self, key: bytes, place: int) -> None:
        """Instants in the order in which they come due, as late as that order allows."""
        tick, later = NOW_TICK, len(Priority)
        for rank in range(len(key) - place, 0, -1):
            code = key[place + rank - 1]
            book = self._books[code & 63]
            request = book.requests[COUNT] if code & 64 else None
            priority = Priority.GENERATION if request is None else request.priority
            if code > 127 and (tick == NOW_TICK or priority > later):
                tick -= 1
            later = priority
            since = tick * TICK + rank
            if request is None:
                book.hungry_since = since
            else:
                request.filed_at, request.due = since, due(since, priority)

    def _map(self, state: State, alive: int) -> None:
        """Who is on which GPU, if somebody has failed since the last load, or had not yet."""
        ledger = state.ledger
        for gpu in range(self.world.gpus):
            ledger.mapped[gpu] = {
                book: None for number, book in enumerate(self._books) if alive >> number & 1 and gpu in book.spec.union
            }
        ledger.mapping_generation = alive
        regions = self._regions.get(alive)
        if regions is None:
            regions = self._regions[alive] = Regions(ledger)
        state.regions = regions
