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
from core.verify.node import Node
from core.verify.world import OLDEST, TICK, World, admitted

PHASES = tuple(Phase)
STATES = tuple(EngineState)
HOLDS = tuple(Hold)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}
STATE_CODE = {state: code for code, state in enumerate(STATES)}
HOLD_CODE = {hold: code for code, hold in enumerate(HOLDS)}
OPERATIONS = (
    None, actions.WakeEngine, actions.SyncEngine, actions.OpenGate, actions.SleepEngine, actions.KillEngine
)  # fmt: skip
OPERATION_CODE = {kind: code for code, kind in enumerate(OPERATIONS) if kind is not None}
ENGINES = frozenset(OPERATION_CODE)

# Canonical numbers. Any would do; these leave room for what comes before.
NOW_TICK = 20
COUNT = 50
"""Latest batch opened and request filed, by each pipeline."""
VERSION = 9
NO_AGE = 3
NO_LAG = 7

# Numbers of actions in flight: one at a time for each engine, GPU, and pipeline.
STOP, GRANT, MEMORY, FIRST_ENGINE, NEXT = 1, 10, 20, 30, 200


class Codec:
    """Packs and loads the nodes of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.node = Node(admitted(world))
        """The scratch node that `load` writes."""
        self._books = self.node.books
        self._index = {book.id: number for number, book in enumerate(self._books)}
        self._holds = [f"hold/{number + 1}" for number in range(world.pipelines)]
        self._quarantines = [f"quarantine/{gpu}" for gpu in range(world.gpus)]
        self._actions: dict[tuple[int, ...], actions.Action] = {}
        self._regions: dict[int, Regions] = {}
        """By which pipelines live."""
        self._signals = world.demand is not DemandPolicy.BATCH

    def first(self) -> bytes:
        """The state in which everybody is admitted."""
        node = Node(admitted(self.world))
        node.faults = self.world.faults
        return self.pack(node)

    # --- pack ------------------------------------------------------------------------------------------

    def pack(self, node: Node) -> bytes:
        state = node.state
        tick = node.now // TICK
        review = 0
        if state.review_at >= 0:
            review = 1 + max(0, state.review_at // TICK - tick)
        out = [node.faults, review | state.contended << 7]
        dues: list[tuple[int, int]] = []
        for number, book in enumerate(node.books):
            self._pack_book(out, node, number, book)
            self._pack_engines(out, node, number, book, tick)
            if book.hungry_since >= 0:
                aged = book.hungry_since // TICK < tick
                dues.append((due(book.hungry_since, Priority.GENERATION), number | aged << 7))
            for request in book.requests.values():
                aged = request.filed_at // TICK < tick
                dues.append((request.due, number | 64 | aged << 7))
        for gpu in state.ledger.gpus:
            self._pack_gpu(out, state, gpu)
        if len(dues) > 1:
            dues.sort()
        out += [code for _, code in dues]
        if state.dirty or state.dirty_gpus or state.replan or state.failing:
            raise InvariantBroken("something changed and was not planned for")
        return bytes(out)

    def _pack_book(self, out: list[int], node: Node, number: int, book: PipelineBook) -> None:
        state = node.state
        held = 0
        for lease in book.leases.values():
            held = 1 + lease.priority
        asked = 0
        for request in book.requests.values():
            asked = 1 + request.priority | request.promised << 4
        if len(book.leases) + len(book.requests) > 1:
            raise InvariantBroken(f"{book.id} has more than one lease or request")
        on_its_way = 0
        if held and state.operations:
            on_its_way = any(isinstance(s, Lease) and s.book is book for _, s in state.operations.values())
        stop = 0 if not book.stop else 1 if book.stop > 0 else 2
        out += (
            node.at[number] | book.allocation << 4 | (book.published >= 0) << 5 | (book in state.unmet) << 6,
            PHASE_CODE[book.phase] | stop << 3 | book.releasing << 5 | book.leave_asked << 6 | book.degraded << 7,
            held | on_its_way << 4,
            asked,
            len(book.batches),
            *(batch.delivered for batch in book.batches.values()),
        )
        if self._signals:
            out.append(book.signal | (0 if book.reported is None else 1 + book.reported) << 1)
        active = node.active[number]
        out += (active & 255, active >> 8, sum(1 << gpu for gpu in book.clearing))

    def _pack_engines(self, out: list[int], node: Node, number: int, book: PipelineBook, tick: int) -> None:
        state = node.state
        ledger, operations = state.ledger, state.operations
        for engine in book.engines:
            where = engine.state
            up = where in UP
            operation = lag = 0
            if engine.operation:
                action = operations[engine.operation][0]
                operation = OPERATION_CODE[type(action)]
                if operation == 1:
                    lag = action.cold
                elif operation == 2:
                    lag = self._lag(book, action.version)
            age = NO_AGE
            if engine.routable_since >= 0 and (up or where is EngineState.DRAINING):
                age = min(OLDEST, tick - engine.routable_since // TICK) if up else 0
            version = self._lag(book, engine.version) if up or where is EngineState.DRAINING else NO_LAG
            done = engine.completed > 0 and (up or engine.deaths > 0)
            out += (
                STATE_CODE[where] | operation << 3 | engine.routable << 6 | engine.doomed << 7,
                age | version << 2 | done << 5 | (engine in ledger.promised) << 6 | (engine in ledger.unserving) << 7,
                lag | engine.strikes << 3 | engine.deaths << 5 | bool(engine.disabled) << 7,
            )

    def _lag(self, book: PipelineBook, version: int) -> int:
        """Versions behind, as far as it makes a difference."""
        return NO_LAG if version < 0 else min(book.published - version, self.world.staleness + 1)

    def _pack_gpu(self, out: list[int], state: State, gpu: Gpu) -> None:
        hold = gpu.hold
        code = HOLD_CODE[hold] | gpu.given_up << 3
        if hold is not Hold.CLEARING and hold is not Hold.QUARANTINED:
            out.append(code)
            return
        watch = 0
        if gpu.watch in state.operations:
            clearing = state.operations[gpu.watch][1]
            assert isinstance(clearing, Clearing) and clearing.book.id == gpu.cleared_by, "watched for somebody else"
            source = clearing.source
            watch = 1 if source is None else 2 if isinstance(source, Lease) else 3 + source.dp_rank
        out += (code | (self._quarantines[gpu.id] in state.timers) << 4, self._index[gpu.cleared_by] | watch << 4)

    # --- load ------------------------------------------------------------------------------------------

    def load(self, key: bytes) -> Node:
        """Write the state into the scratch node, which is valid until the next load."""
        node = self.node
        state = node.state
        ledger = state.ledger
        node.now = NOW_TICK * TICK + 40
        node.faults, review = key[0], key[1]
        self._reset(state)
        ledger.now = node.now
        if review & 127:
            state.review_at = (NOW_TICK + (review & 127) - 1) * TICK
            state.timers["review"] = 1
        state.contended = review > 127
        place = 2
        alive = 0
        for number, book in enumerate(self._books):
            place = self._load_book(node, number, book, key, place)
            place = self._load_engines(node, number, book, key, place)
            alive |= book.alive << number
        for gpu in ledger.gpus:
            place = self._load_gpu(state, gpu, key, place)
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
        for gpu in ledger.gpus:
            gpu.promised = gpu.engine = gpu.lease = None

    def _load_book(self, node: Node, number: int, book: PipelineBook, key: bytes, place: int) -> int:
        state = node.state
        first, second, held, asked, batches = key[place : place + 5]
        place += 5
        node.at[number] = first & 15
        book.allocation = bool(first & 16)
        book.published = VERSION if first & 32 else -1
        if first & 64:
            state.unmet[book] = None
        book.phase = PHASES[second & 7]
        stop = second >> 3 & 3
        book.stop = (0, STOP + number, -1)[stop]
        if stop == 1:
            state.operations[STOP + number] = self._stop(number, book), book
        book.releasing, book.leave_asked, book.degraded = bool(second & 32), bool(second & 64), bool(second & 128)
        book.seq = 1
        book.reason = ""
        book.requests_through = book.opened_through = COUNT
        book.requests, book.leases = {}, {}
        if held:
            self._lease(state, number, book, held)
        if asked:
            self._ask(state, book, asked)
        self._load_batches(book, key[place : place + batches])
        place += batches
        book.signal, book.reported = False, None
        if self._signals:
            said = key[place]
            place += 1
            book.signal = bool(said & 1)
            book.reported = (said >> 1) - 1 if said >> 1 else None
        node.active[number] = key[place] | key[place + 1] << 8
        clearing = key[place + 2]
        book.clearing = {gpu: None for gpu in range(self.world.gpus) if clearing >> gpu & 1} if clearing else {}
        book.hungry_since = -1
        return place + 3

    def _load_batches(self, book: PipelineBook, delivered: bytes) -> None:
        first = COUNT - len(delivered) + 1
        target = self.world.target
        book.batches = {
            first + i: BatchState(batch=first + i, target=target, delivered=done) for i, done in enumerate(delivered)
        }
        book.open_target = target * len(delivered)
        book.open_demand = book.planned_at = book.open_target - sum(delivered)

    def _lease(self, state: State, number: int, book: PipelineBook, held: int) -> None:
        request = self._request(book, held & 15)
        lease = Lease(number + 1, request, 0)
        book.leases[lease.epoch] = state.ledger.leases[lease.epoch] = lease
        if lease.priority is Priority.INITIALIZATION:
            state.ledger.init = lease
        state.timers[self._holds[number]] = 1
        for gpu in lease.gpus:
            state.ledger.gpus[gpu].lease = lease
        if held & 16:
            action = actions.GrantLease(
                action=GRANT + number, pipeline=book.id, request=COUNT, role=lease.role, epoch=lease.epoch,
                gpus=lease.gpus,
            )  # fmt: skip
            state.operations[GRANT + number] = action, lease

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
        priority = Priority((asked & 15) - 1)
        train = book.spec.group(Role.ACTOR_TRAIN)
        assert train is not None
        gpus = book.spec.union if priority is Priority.INITIALIZATION else train.gpus
        request = Request(book, COUNT, Role.ACTOR_TRAIN, priority, gpus, 0, 0)
        request.promised = bool(asked & 16)
        return request

    def _load_engines(self, node: Node, number: int, book: PipelineBook, key: bytes, place: int) -> int:
        state = node.state
        ledger = state.ledger
        book.up = {}
        for engine in book.engines:
            first, second, third = key[place : place + 3]
            place += 3
            engine.state = STATES[first & 7]
            engine.routable, engine.doomed = bool(first & 64), first > 127
            age, lag = second & 3, second >> 2 & 7
            engine.routable_since = -1 if age == NO_AGE else (NOW_TICK - age) * TICK
            engine.version = -1 if lag == NO_LAG else VERSION - lag
            engine.completed = second >> 5 & 1
            engine.strikes, engine.deaths = third >> 3 & 3, third >> 5 & 3
            engine.disabled = "it may not be used" if third > 127 else ""
            engine.operation = 0
            operation = first >> 3 & 7
            if operation:
                engine.operation = FIRST_ENGINE + number * 8 + engine.dp_rank
                action = self._engine_action(engine, OPERATIONS[operation], third & 7)
                state.operations[engine.operation] = action, engine
            promised = second & 64
            if promised:
                ledger.promised[engine] = None
                for gpu in engine.gpus:
                    ledger.gpus[gpu].promised = engine
            if engine.holds:
                for gpu in engine.gpus:
                    ledger.gpus[gpu].engine = engine
            if second > 127:
                ledger.unserving[engine] = None
            if engine.doomed:
                ledger.doomed[engine] = None
            if promised or (engine.state in UP and not engine.doomed):
                book.up[engine.dp_rank] = engine
        return place

    def _engine_action(self, engine: Engine, kind: type[actions.Action], detail: int) -> actions.Action:
        code = engine.operation, OPERATION_CODE[kind], detail, engine.version
        found = self._actions.get(code)
        if found is None:
            who = {"action": engine.operation, "pipeline": engine.book.id, "dp_rank": engine.dp_rank, "epoch": 0}
            if kind is actions.WakeEngine:
                more = {"gpus": engine.gpus, "cold": bool(detail)}
            elif kind is actions.SyncEngine:
                more = {"version": -1 if detail == NO_LAG else VERSION - detail}
            elif kind is actions.OpenGate:
                more = {"version": engine.version}
            elif kind is actions.SleepEngine:
                more = {"emptying": Emptying.ABORT}
            else:
                more = {"reason": ""}
            found = self._actions[code] = kind(**who, **more)
        return found

    def _load_gpu(self, state: State, gpu: Gpu, key: bytes, place: int) -> int:
        code = key[place]
        gpu.hold = HOLDS[code & 7]
        gpu.given_up = bool(code & 8)
        gpu.watch = 0
        gpu.cleared_by = ""
        if gpu.hold is not Hold.CLEARING and gpu.hold is not Hold.QUARANTINED:
            return place + 1
        if code & 16:
            state.timers[self._quarantines[gpu.id]] = 1
        more = key[place + 1]
        book = self._books[more & 15]
        gpu.cleared_by = book.id
        watch = more >> 4
        if watch:
            gpu.watch = MEMORY + gpu.id
            source = None if watch == 1 else self._gone_lease(book) if watch == 2 else book.engines[watch - 3]
            state.operations[gpu.watch] = self._memory(gpu), Clearing(gpu.id, book, source)
        return place + 2

    @staticmethod
    def _gone_lease(book: PipelineBook) -> Lease:
        """A lease that is over; all that is asked of it is what it was."""
        return Lease(0, Request(book, 0, Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING, (), 0, 0), 0)

    def _memory(self, gpu: Gpu) -> actions.Action:
        code = (MEMORY + gpu.id,)
        found = self._actions.get(code)
        if found is None:
            found = self._actions[code] = actions.AwaitMemory(action=gpu.watch, gpus=(gpu.id,), need=(0,))
        return found

    def _stop(self, number: int, book: PipelineBook) -> actions.Action:
        return actions.StopPipeline(action=STOP + number, pipeline=book.id, reason="")

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
