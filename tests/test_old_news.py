"""What the scheduler hears about something that is over changes nothing. Each test closes a hole a mutant showed."""

from core import events
from tests.core_world import CoreWorld, spec


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
