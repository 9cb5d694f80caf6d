"""From bytes back to a node, in canonical numbers. The search does little else, so what can be is done once:

1. What the bytes of one pipeline mean is worked out the first time they are met and kept as a `Section`; so is what
   those after the pipelines mean, as a `Tail`. From then on to load them is to assign.
2. What is kept is never handed to the scheduler to be changed: it gets copies, or what nobody changes.
"""

from typing import Any, NamedTuple

from core import actions
from core.actions import Emptying
from core.demand import due
from core.ledger import UP, Engine, EngineState, Gpu, Hold, Lease, Phase, PipelineBook, Request
from core.model import BatchState, Priority, Role
from core.regions import Regions
from core.state import Clearing, State, Subject
from core.verify.layout import (
    COUNT,
    ENGINE,
    FIRST_ENGINE,
    HEAD,
    HOLDS,
    MEMORY,
    NEXT,
    NO_AGE,
    NO_LAG,
    NOW_TICK,
    OPERATIONS,
    PHASES,
    PRIORITIES,
    START,
    STATES,
    STOP,
    VERSION,
    WATCHED,
    batches,
)
from core.verify.node import Node
from core.verify.world import TICK, World

KEPT = 100_000
"""Sections of a pipeline, and tails, that are remembered; one more and all are forgotten."""

Operations = dict[int, tuple[actions.Action, Subject]]


class Wanted(NamedTuple):
    """A lease or a request."""

    priority: Priority
    gpus: tuple[int, ...]
    promised: bool


class Section(NamedTuple):
    """What the bytes of one pipeline mean."""

    book: tuple[Any, ...]
    """In the order of `Loader._assign`."""
    engines: tuple[tuple[Engine, tuple[Any, ...]], ...]
    alive: int
    unmet: bool
    clearing: dict[int, None]
    batches: dict[int, BatchState]
    up: dict[int, Engine]
    operations: Operations
    held: Wanted | None
    """The lease it has."""
    asked: Wanted | None
    priority: int
    """The code of the priority of what it asks for, in this pipeline's four bits: its instants depend on it."""
    holding: tuple[tuple[Gpu, Engine], ...]
    """GPUs in an engine's name."""
    promised: tuple[tuple[Engine, tuple[Gpu, ...]], ...]
    unserving: tuple[Engine, ...]
    doomed: tuple[Engine, ...]


class Tail(NamedTuple):
    """What the bytes after the pipelines mean."""

    holds: tuple[tuple[Gpu, Hold, bool], ...]
    """And whether it was given up."""
    cleared: tuple[tuple[Gpu, str, int], ...]
    """By whom, and the number of the watch, or 0."""
    operations: Operations
    timers: dict[str, int]
    hungry: tuple[tuple[PipelineBook, int], ...]
    """Since when."""
    filed: tuple[tuple[PipelineBook, int, int], ...]
    """When its request was filed, and is due."""


class Loader:
    """Writes nodes into one scratch node."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._state: State = node.state
        self._gpus = node.state.ledger.gpus
        self._books = node.books
        self._parts: list[tuple[int, PipelineBook, int, dict[bytes, Section]]] = [
            (number, book, HEAD + ENGINE * len(book.engines), {}) for number, book in enumerate(node.books)
        ]
        """Of each pipeline: its number, its book, how long it is without batches, and the sections met."""
        self._tails: dict[tuple[int, bytes], Tail] = {}
        """With the priorities asked for."""
        self._regions: dict[int, Regions] = {}
        """By which pipelines live."""
        self._memory = [actions.AwaitMemory(action=MEMORY + gpu, gpus=(gpu,), need=(0,)) for gpu in range(world.gpus)]

    def load(self, key: bytes) -> Node:
        """Write the state into the scratch node, which is valid until the next load."""
        node, state = self._node, self._state
        ledger = state.ledger
        node.now = ledger.now = NOW_TICK * TICK + 40
        node.faults, review, node.dregs = key[0], key[1], key[2]
        self._reset(state)
        if review:
            state.review_at = (NOW_TICK + review - 1) * TICK
            state.timers["review"] = 1
        place = START
        alive = priorities = 0
        for number, book, length, known in self._parts:
            end = place + length + batches(key, place)
            code = key[place:end]
            place = end
            section = known.get(code)
            if section is None:
                section = _keep(known, code, self._section(number, code))
            alive |= section.alive
            priorities |= section.priority
            self._assign(number, book, section)
        asked = priorities, key[place:]
        tail = self._tails.get(asked)
        if tail is None:
            tail = _keep(self._tails, asked, self._tail(*asked))
        self._assign_tail(state, tail)
        if ledger.mapping_generation != alive or state.regions is not self._regions.get(alive):
            self._map(state, alive)
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

    # --- assigning --------------------------------------------------------------------------------------

    def _assign(self, number: int, book: PipelineBook, section: Section) -> None:
        node, state = self._node, self._state
        (
            values, engines, _, unmet, clearing, open_batches, up, operations, held, asked, _, holding, promised,
            unserving, doomed,
        ) = section  # fmt: skip
        (
            node.at[number], node.active[number], book.allocation, book.published, book.phase, book.stop,
            book.releasing, book.leave_asked, book.degraded, book.signal, book.reported, book.gave_way_at,
            book.open_target, book.open_demand, book.planned_at,
            book.seq, book.reason, book.requests_through, book.opened_through, book.hungry_since,
        ) = values  # fmt: skip
        book.requests, book.leases = {}, {}
        book.clearing, book.batches, book.up = clearing.copy(), open_batches.copy(), up.copy()
        for engine, fields in engines:
            (
                engine.state, engine.routable, engine.doomed, engine.routable_since, engine.version, engine.completed,
                engine.strikes, engine.deaths, engine.disabled, engine.operation,
            ) = fields  # fmt: skip
        if unmet:
            state.unmet[book] = None
        if operations:
            state.operations.update(operations)
        if held is not None:
            self._lease(state, number, book, held)
        elif asked is not None:
            self._ask(state, book, asked)
        for gpu, engine in holding:
            gpu.engine = engine
        ledger = state.ledger
        for engine, gpus in promised:
            ledger.promised[engine] = None
            for gpu in gpus:
                gpu.promised = engine
        for engine in unserving:
            ledger.unserving[engine] = None
        for engine in doomed:
            ledger.doomed[engine] = None

    def _lease(self, state: State, number: int, book: PipelineBook, held: Wanted) -> None:
        lease = Lease(number + 1, _request(book, held), 0)
        book.leases[lease.epoch] = state.ledger.leases[lease.epoch] = lease
        if lease.priority is Priority.INITIALIZATION:
            state.ledger.init = lease
        state.timers[f"hold/{number + 1}"] = 1
        for gpu in lease.gpus:
            self._gpus[gpu].lease = lease

    def _ask(self, state: State, book: PipelineBook, asked: Wanted) -> None:
        ledger = state.ledger
        request = book.requests[COUNT] = _request(book, asked)
        if not asked.promised:
            ledger.waiting[request] = None
            return
        request.promised = True
        ledger.promised[request] = None
        if request.priority is Priority.INITIALIZATION:
            ledger.init = request
        for gpu in request.gpus:
            self._gpus[gpu].promised = request

    @staticmethod
    def _assign_tail(state: State, tail: Tail) -> None:
        for gpu, hold, given_up in tail.holds:
            gpu.hold, gpu.given_up, gpu.watch = hold, given_up, 0
        if tail.cleared:
            for gpu, by, watch in tail.cleared:
                gpu.cleared_by, gpu.watch = by, watch
            state.operations.update(tail.operations)
            state.timers.update(tail.timers)
        for book, since in tail.hungry:
            book.hungry_since = since
        for book, filed_at, due_at in tail.filed:
            request = book.requests[COUNT]
            request.filed_at, request.due = filed_at, due_at

    def _map(self, state: State, alive: int) -> None:
        """Who is on which GPU, if somebody has failed since the last load, or had not yet."""
        ledger = state.ledger
        for gpu in range(self._world.gpus):
            ledger.mapped[gpu] = {
                book: None for number, book in enumerate(self._books) if alive >> number & 1 and gpu in book.spec.union
            }
        ledger.mapping_generation = alive
        regions = self._regions.get(alive)
        if regions is None:
            regions = self._regions[alive] = Regions(ledger)
        state.regions = regions

    # --- what bytes mean --------------------------------------------------------------------------------

    def _section(self, number: int, code: bytes) -> Section:
        first, second, held, asked, said, active, more, clearing = code[:HEAD]
        book = self._books[number]
        delivered, engine_codes = code[HEAD : HEAD + (asked >> 5)], code[HEAD + (asked >> 5) :]
        phase, stop = PHASES[second & 7], (0, STOP + number, -1)[second >> 3 & 3]
        target = self._world.target
        open_target = target * len(delivered)
        open_demand = open_target - sum(delivered)
        operations: Operations = {}
        if stop > 0:
            operations[stop] = actions.StopPipeline(action=stop, pipeline=book.id, reason=""), book
        values = (
            first & 15, active | more << 8, first & 16 > 0, VERSION if first & 32 else -1, phase, stop,
            second & 32 > 0, second & 64 > 0, second & 128 > 0, said & 1 > 0, (said >> 1) - 1 if said >> 1 else None,
            NOW_TICK * TICK if first > 127 else -1,
            open_target, open_demand, open_demand,
            1, "", COUNT, COUNT, -1,
        )  # fmt: skip
        oldest = COUNT - len(delivered) + 1
        return Section(
            book=values,
            alive=(phase is not Phase.FAILED and phase is not Phase.LEFT) << number,
            unmet=first & 64 > 0,
            clearing={gpu: None for gpu in range(self._world.gpus) if clearing >> gpu & 1},
            batches={
                oldest + i: BatchState(batch=oldest + i, target=target, delivered=n) for i, n in enumerate(delivered)
            },
            held=_wanted(book, held),
            asked=_wanted(book, asked & 31),
            priority=(asked & 15) << 4 * number,
            **self._engines(number, engine_codes, operations),
        )

    def _engines(self, number: int, codes: bytes, operations: Operations) -> dict[str, Any]:
        """The fields of a `Section` that its engines say. `operations`: those of the pipeline so far."""
        found, holding, promised, unserving, doomed = [], [], [], [], []
        up: dict[int, tuple[int, Engine]] = {}
        for engine in self._books[number].engines:
            first, second, third, order = codes[ENGINE * engine.dp_rank : ENGINE * (engine.dp_rank + 1)]
            state, is_doomed, is_promised = STATES[first & 7], first > 127, second & 64 > 0
            age, lag = second & 3, second >> 2 & 7
            version = -1 if lag == NO_LAG else VERSION - lag
            kind = OPERATIONS[first >> 3 & 7]
            operation = 0
            if kind is not None:
                operation = FIRST_ENGINE + 8 * number + engine.dp_rank
                operations[operation] = _action(operation, kind, engine, third & 7, version), engine
            routable_since = -1 if age == NO_AGE else (NOW_TICK - age) * TICK + order
            disabled = "it may not be used" if third > 127 else ""
            found.append((engine, (
                state, first & 64 > 0, is_doomed, routable_since, version, second >> 5 & 1, third >> 3 & 3,
                third >> 5 & 3, disabled, operation,
            )))  # fmt: skip
            gpus = tuple(self._gpus[gpu] for gpu in engine.gpus)
            if state in UP or state is EngineState.DRAINING:
                holding += [(gpu, engine) for gpu in gpus]
            if is_promised:
                promised.append((engine, gpus))
            if second > 127:
                unserving.append(engine)
            if is_doomed:
                doomed.append(engine)
            if is_promised or (state in UP and not is_doomed):
                up[engine.dp_rank] = order, engine
        ranks = sorted(up, key=lambda rank: up[rank][0])  # promised in another order than that of ranks, perhaps
        return {
            "engines": tuple(found), "holding": tuple(holding), "promised": tuple(promised), "doomed": tuple(doomed),
            "unserving": tuple(unserving), "up": {rank: up[rank][1] for rank in ranks}, "operations": operations,
        }  # fmt: skip

    def _tail(self, priorities: int, code: bytes) -> Tail:
        holds, cleared = [], []
        operations: Operations = {}
        timers: dict[str, int] = {}
        place = 0
        for gpu in self._gpus:
            first = code[place]
            place += 1
            holds.append((gpu, HOLDS[first & 7], first & 8 > 0))
            if first & 7 not in WATCHED:
                continue
            second = code[place]
            place += 1
            if first & 16:
                timers[f"quarantine/{gpu.id}"] = 1
            book, source = self._books[second & 15], second >> 4
            cleared.append((gpu, book.id, MEMORY + gpu.id if source else 0))
            if source:
                by = None if source == 1 else _over(book) if source == 2 else book.engines[source - 3]
                operations[MEMORY + gpu.id] = self._memory[gpu.id], Clearing(gpu.id, book, by)
        return Tail(tuple(holds), tuple(cleared), operations, timers, *self._dues(priorities, code[place:]))

    def _dues(
        self, priorities: int, codes: bytes
    ) -> tuple[tuple[tuple[PipelineBook, int], ...], tuple[tuple[PipelineBook, int, int], ...]]:
        """Instants in the order in which they come due, as late as that order allows: of hunger, and of requests."""
        hungry, filed = [], []
        tick, later = NOW_TICK, len(Priority)
        for rank in range(len(codes), 0, -1):
            code = codes[rank - 1]
            book = self._books[code & 63]
            asked = code & 64 > 0
            priority = PRIORITIES[(priorities >> 4 * (code & 63) & 15) - 1] if asked else Priority.GENERATION
            if code > 127 and (tick == NOW_TICK or priority > later):
                tick -= 1
            later = priority
            since = tick * TICK + rank
            if asked:
                filed.append((book, since, due(since, priority)))
            else:
                hungry.append((book, since))
        return tuple(hungry), tuple(filed)


def _keep(known: dict[bytes, Any], code: bytes, meaning: Any) -> Any:
    if len(known) >= KEPT:
        known.clear()
    known[code] = meaning
    return meaning


def _wanted(book: PipelineBook, code: int) -> Wanted | None:
    if not code:
        return None
    priority = PRIORITIES[(code & 15) - 1]
    train = book.spec.group(Role.ACTOR_TRAIN)
    assert train is not None
    gpus = book.spec.union if priority is Priority.INITIALIZATION else train.gpus
    return Wanted(priority, gpus, code & 16 > 0)


def _request(book: PipelineBook, wanted: Wanted) -> Request:
    return Request(book, COUNT, Role.ACTOR_TRAIN, wanted.priority, wanted.gpus, 0, 0)


def _over(book: PipelineBook) -> Lease:
    """A lease that is over; all that is asked of it is that it was one."""
    return Lease(0, Request(book, 0, Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING, (), 0, 0), 0)


def _action(action: int, kind: type[actions.Action], engine: Engine, detail: int, version: int) -> actions.Action:
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
