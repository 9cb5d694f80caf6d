"""Single rules of the scheduler, on the books alone. Each test closes a hole that a mutant showed (docs/mutants.md)."""

import pytest

from core import actions, events
from core.errors import Displaced, UnknownName
from core.model import MemoryNeeds, PipelineState, Priority
from core.units import seconds
from tests.core_world import LIMITS, CoreWorld, S, spec


def test_a_timer_of_another_generation_rings_for_nobody() -> None:
    world = CoreWorld()
    world.ready(spec("a"))
    world.ask("a")
    world.settle()
    [(name, generation)] = world.state.timers.items()
    decision = world.feed(events.TimerFired(timer=name, generation=generation - 1))
    assert name.startswith("hold/") and not decision.actions
    assert world.state.timers == {name: generation}
    assert world.state.ledger.books["a"].alive and world.holder(0) == "a"


def test_a_gate_that_opened_under_an_older_lease_is_shown_to_nobody() -> None:
    """The answer to an `OpenGate` may come after a kill, another wake and another gate."""
    world = CoreWorld()
    world.ready(spec("a"))
    world.open("a")
    world.settle()
    engine = world.state.ledger.books["a"].engines[0]
    assert world.state.serves("a", 0, engine.epoch)
    assert not world.state.serves("a", 0, engine.epoch - 1)


def test_a_lease_past_its_limit_ends_with_its_pipeline_and_the_next_one_gets_its_gpus() -> None:
    """A client that never releases, and is not lost either, holds nothing for ever."""
    world = CoreWorld()
    world.ready(spec("a"), spec("b"))
    world.ask("a")
    world.settle()
    world.ask("b")
    world.sleep(seconds(LIMITS.hold) - 1)
    assert world.state.ledger.books["a"].alive and world.holder(0) == "a"
    world.sleep(1)
    world.settle()
    assert "held GPUs [0] for 600 s, longer than its limit" in world.state.ledger.books["a"].reason
    assert world.holder(0) == "b"


def test_a_nearly_finished_donor_is_spared_for_one_more_residence() -> None:
    world = CoreWorld(1)
    world.ready(spec("a", (0,), (0,)), spec("b", (0,), (0,)))
    world.open("a", 30)
    world.settle()
    for _ in range(28):
        world.complete("a")
    world.open("b", 30)
    world.sleep(39)  # residence is 20 s
    world.settle()
    assert world.serving("a") == [0]
    world.sleep(1)
    world.settle()
    assert world.serving("b") == [0]


def test_a_gpu_whose_node_left_is_given_to_nobody() -> None:
    world = CoreWorld(2, nodes=2)
    world.ready(spec("a"))
    world.open("a")
    world.settle()
    assert world.serving("a") == [0, 1]
    world.feed(events.NodeLeft(node=1))
    world.settle()
    assert world.holder(1) == "lost"
    assert world.serving("a") == [0]


def test_what_an_earlier_client_of_a_name_said_does_not_count_for_the_present_one() -> None:
    world = CoreWorld()
    world.ready(spec("a"))
    world.say(events.PipelineLeft, "a")
    world.settle()
    world.new_client("a")
    world.ready(spec("a"))
    book = world.state.ledger.books["a"]
    for late in (
        events.BatchOpened(pipeline="a", seq=book.seq + 1, batch=0, target=4),
        events.StateResent(pipeline="a", seq=book.seq + 9, state=PipelineState(left=True)),
        events.PipelineRegistered(pipeline="a", seq=0, spec=spec("a", (1,))),
        events.ClientLost(pipeline="a", reason="no heartbeat"),
    ):
        seq = book.seq
        decision = world.feed(late)
        assert world.state.ledger.books["a"] is book and book.alive and book.seq == seq and not book.batches
        assert not decision.actions
        assert all(reply.life == 0 and isinstance(reply.error, Displaced) for reply in decision.replies)


@pytest.mark.parametrize("gone", [
    events.PipelineLeft(pipeline="a", seq=1), events.ClientLost(pipeline="a", reason="no heartbeat")
])  # fmt: skip
def test_a_client_that_gave_up_before_it_was_heard_registers_nothing(gone: events.Event) -> None:
    """Its registration is still on its way then, and nobody would speak for what it registers."""
    world = CoreWorld()
    for reply in world.feed(gone).replies:
        assert isinstance(reply.error, UnknownName)
    world.feed(events.PipelineRegistered(pipeline="a", seq=0, spec=spec("a")))
    assert not world.state.ledger.books
    world.new_client("a")
    world.ready(spec("a"))


def test_a_registration_that_comes_once_more_after_its_pipeline_left_registers_nothing() -> None:
    world = CoreWorld()
    world.ready(spec("a"))
    world.say(events.PipelineLeft, "a")
    world.settle()
    book = world.state.ledger.books["a"]
    assert not world.feed(events.PipelineRegistered(pipeline="a", seq=0, spec=spec("a"))).actions
    assert world.state.ledger.books["a"] is book and not book.alive


def kept(world: CoreWorld, free: int) -> None:
    """End the watch of GPU 0 with so much seen free, as done if that is enough for whoever comes next."""
    [watch] = [action for action in world.pending.values() if isinstance(action, actions.AwaitMemory)]
    del world.pending[watch.action]
    if free >= watch.need[0]:
        world.feed(events.ActionDone(action=watch.action, free={0: free}))
    else:
        reason = f"GPU 0 shows {free} bytes free"
        world.feed(events.ActionFailed(action=watch.action, reason=reason, free={0: free}))


@pytest.mark.parametrize(("seen", "guilty"), [(53, "a"), (52, "b")])
def test_who_releases_after_somebody_kept_too_much_has_to_go_only_if_still_more_is_missing(
    seen: int, guilty: str
) -> None:
    """With what a's engine keeps b can initialise. From then on b's training is to fit too, and that it cannot."""
    world = CoreWorld(1)
    world.ready(spec("a", (0,), (0,)))
    world.open("a")
    world.settle()
    large = MemoryNeeds(train=70, engine=50, residue=1, init_peak=50, host_cache=1)
    assert world.join(spec("b", (0,), (0,), memory=large)) is None
    assert world.ask("b", priority=Priority.INITIALIZATION) is None
    world.settle(actions.SleepEngine)
    kept(world, 55)
    assert any(note.kind == "residue_growth" and note.pipeline == "a" for note in world.notes)
    world.settle()
    world.say(events.WeightsPublished, "b", version=0)
    world.release("b")
    kept(world, seen)
    killed = [action.pipeline for action in world.pending.values() if isinstance(action, actions.KillEngine)]
    assert (killed == ["a"]) == (guilty == "a")
    assert world.state.ledger.books["b"].alive == (guilty == "a") and world.state.ledger.books["a"].alive
    world.settle()
    assert world.serving("a") == [0]


def test_whoever_completes_nothing_in_its_turn_stands_last_in_line_again() -> None:
    """However many there are of them, the others get their turns between theirs."""
    world = CoreWorld(1)
    names = ("a", "b", "c", "d")
    world.ready(*[spec(name, (0,), (0,)) for name in names])
    for name in names:
        world.open(name)
    world.settle()
    served = []
    for _ in range(8):
        served += [name for name in names if world.serving(name)]
        world.sleep(LIMITS.turn / S)
        world.settle()
    assert sorted(served[:4]) == sorted(served[4:]) == list(names)


def test_whose_promise_is_broken_gets_another_engine_at_once() -> None:
    """`a` is promised the GPU that `b` leaves, since its first engine lies there. The memory does not come back: it
    wakes on the other one, though nobody but `a` is mapped to that, and nothing happened there."""
    world = CoreWorld(2)
    world.ready(spec("b", (0,), (0,)), spec("a", (1,), (0, 1)))
    world.open("b", 1)
    world.settle()
    world.complete("b")
    world.close("b")
    world.say(events.RolloutReleased, "b")
    world.settle(actions.SleepEngine)
    [watch] = [action for action in world.pending.values() if isinstance(action, actions.AwaitMemory)]
    world.open("a", 1)
    assert watch.gpus == (0,) and list(world.state.ledger.books["a"].up) == [0]
    world.end(watch, "failed")
    world.settle()
    assert world.serving("a") == [1]
