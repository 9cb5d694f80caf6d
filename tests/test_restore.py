"""A control plane that died goes on from its log: cut anywhere, it knows what it knew and does what had no outcome.

The log is a run's of the simulator, with faults in it. At every cut a new service is restored from what came before, on
a backend that answers nothing, and compared with a scheduler that was told the same events and never died.
"""

import functools
import pickle
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_service import Clock

from core import actions, events
from core.config import Fault, Scenario
from core.run import execute
from core.scheduler import decide, new_state
from core.service import Service
from core.trace import Entry, Log
from scenarios import catalogue
from tests.worlds import SECOND

FAULTS = (
    Fault(at=90 * SECOND, kind="kill_engine", pipeline="p1", dp_rank=1),
    Fault(at=130 * SECOND, kind="hang_engine", pipeline="p2", dp_rank=0),
)


class Silent:
    """A backend that is asked, and never answers."""

    name = "silent"

    def __init__(self) -> None:
        self.clock = Clock()
        self.asked: list[actions.Action] = []

    async def perform(self, action: Any) -> Any:
        self.asked.append(action)
        await anyio.sleep_forever()


class Client:
    """A pipeline's end of the line in another process."""

    def __init__(self, told: list[actions.Action]) -> None:
        self.gates = self
        self.command = told.append

    def replied(self, seq: int, error: Any) -> None: ...

    def close_gate(self, dp_rank: int) -> None: ...


@functools.cache
def recorded() -> tuple[Scenario, tuple[Entry, ...]]:
    scenario = catalogue.load("overlap_2gpu")
    scenario = type(scenario)(**{**{f: getattr(scenario, f) for f in scenario.__struct_fields__}, "faults": FAULTS})
    log = Log()
    execute(scenario, "sim", [log])
    return scenario, tuple(entry for entry in log.entries if not hasattr(entry.item, "outcome"))


def is_decided(entry: Entry) -> bool:
    return isinstance(entry.item, events.SCHEDULED)


def books(state: Any) -> dict[str, Any]:
    """What a scheduler knows, as far as it can be compared."""
    ledger = state.ledger
    return {
        "operations": {number: action for number, (action, _) in state.operations.items()},
        "timers": dict(state.timers),
        "gpus": [(gpu.hold, gpu.why) for gpu in ledger.gpus],
        "engines": {
            (book.id, engine.dp_rank): (engine.state, engine.epoch, engine.version, engine.routable)
            for book in ledger.books.values()
            for engine in book.engines
        },
        "phases": {book.id: book.phase for book in ledger.books.values()},
        "next": (state.next_action, state.next_epoch, state.next_generation),
    }


class Restored:
    """A service restored from the first `cut` entries; from a snapshot of an earlier life after the first `kept` of
    them, if that is more than none."""

    def __init__(self, cut: int, kept: int = 0) -> None:
        self.scenario, entries = recorded()
        self.before, self.after, self.kept = entries[:cut], entries[cut:], kept
        self.backend = Silent()
        self.told: list[actions.Action] = []
        self.log = Log()
        self.service = Service(self.backend, self.scenario.cluster, self.scenario.demand, [self.log])  # type: ignore[arg-type]

    async def run(self) -> "Restored":
        self.backend.clock.now = self.before[-1].t if self.before else 0
        async with self.service:
            for job in self.scenario.jobs:
                self.service.attach(job.spec.id, Client(self.told))  # type: ignore[arg-type]
            self.service.restore(self.before[self.kept :], await snapshot(self.kept) if self.kept else None)
            await anyio.wait_all_tasks_blocked()
        return self

    def expected(self) -> Any:
        state = new_state(self.scenario.cluster, self.scenario.demand)
        for entry in self.before:
            if is_decided(entry):
                decide(state, entry.t, entry.item)
        return state


def restored(cut: int, kept: int = 0) -> Restored:
    return anyio.run(Restored(cut, kept).run)


async def snapshot(entries: int) -> Any:
    """What a service knew after so many entries, as another process reads it from a file."""
    earlier = await Restored(entries).run()
    return pickle.loads(pickle.dumps(earlier.service.snapshot(), pickle.HIGHEST_PROTOCOL))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_restored_control_plane_knows_what_the_dead_one_knew_wherever_it_was_cut_off(place: int) -> None:
    cut = place % (len(recorded()[1]) + 1)
    assert books(restored(cut).service.state) == books(restored(cut).expected())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_what_had_no_outcome_is_begun_again_and_nothing_else(place: int) -> None:
    cut = place % (len(recorded()[1]) + 1)
    found = restored(cut)
    operations = found.expected().operations
    begun = [*found.backend.asked, *found.told]
    assert sorted(action.action for action in begun) == sorted(operations)
    assert all(operations[action.action][0] == action for action in begun)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_log_goes_on_as_if_nobody_had_died(place: int) -> None:
    """What was decided last and is missing at the end of the log is logged first, in its place."""
    cut = place % (len(recorded()[1]) + 1)
    found = restored(cut)
    missing = []
    for entry in found.after:
        if is_decided(entry) or isinstance(entry.item, events.TELEMETRY):
            break
        missing.append(entry)
    if not found.before or not any(is_decided(entry) for entry in found.before):
        missing = []
    written = [entry for entry in found.log.entries if not isinstance(entry.item, events.SCHEDULED)]
    assert [(entry.i, entry.item) for entry in written] == [(entry.i, entry.item) for entry in missing]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_snapshot_and_what_came_after_it_are_as_good_as_the_whole_log(early: int, late: int) -> None:
    kept, cut = sorted(number % len(recorded()[1]) + 1 for number in (early, late))
    while not whole_before(kept):
        kept -= 1  # nobody takes a snapshot in the middle of an event
    known, whole = restored(cut, kept), restored(cut)
    assert books(known.service.state) == books(whole.service.state)
    assert known.service.snapshot()[0] == whole.service.snapshot()[0]
    begun = [[*found.backend.asked, *found.told] for found in (known, whole)]
    assert begun[0] == begun[1]
    assert [action for action, _ in known.service.snapshot().begun] == [
        action for action, _ in whole.service.snapshot().begun
    ]
    assert known.log.entries == whole.log.entries
    assert decided_from(known) == decided_from(whole)


def whole_before(entries: int) -> bool:
    """Whether everything that the last event led to is in the log before the entry of that number."""
    _, all_entries = recorded()
    return entries == len(all_entries) or not isinstance(all_entries[entries].item, actions.Action | actions.Note)


def decided_from(found: Restored) -> list[Any]:
    """What its state, told of everything that came later, decides."""
    state = found.service.state
    decided = [decide(state, entry.t, entry.item) for entry in found.after if is_decided(entry)]
    return [(decision.notes, decision.actions) for decision in decided]


def test_a_timer_that_should_have_rung_while_nobody_was_there_rings_at_once() -> None:
    _, entries = recorded()
    cut = next(n for n, entry in enumerate(entries, 1) if isinstance(entry.item, actions.StartTimer))
    found = Restored(cut)
    timer = entries[cut - 1].item

    async def late() -> bool:
        async with found.service:
            found.backend.clock.now = timer.at + 5 * SECOND
            found.service.restore(found.before)
            alarm = min(found.backend.clock.alarms, key=lambda a: a.at)
            return alarm.at == timer.at <= found.backend.clock.now

    assert anyio.run(late)


def test_an_empty_log_is_a_fresh_start() -> None:
    found = restored(0)
    assert not found.backend.asked
    assert not found.service.state.operations


@pytest.fixture(autouse=True, scope="module")
def _the_run_has_something_to_restore() -> None:
    kinds = {type(entry.item) for entry in recorded()[1]}
    assert {actions.KillEngine, actions.GrantLease, actions.StartTimer, events.EngineDied} <= kinds
