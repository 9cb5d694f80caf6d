"""The core machine's moves, taken at random among those that do something.

The machine of `test_core_machine` lets Hypothesis choose, which shrinks well but seldom gets far: most of what it draws
does nothing yet, so that in 120 histories nobody ever repeats its state. Here each step is one that changes something.
The checks are the machine's own: after every event the books add up and planning again changes nothing, and everybody
is served in the end.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from core_world import CoreWorld, spec
from hypothesis import Phase as Phases
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core_machine import Core, heal

from core import actions
from core.ledger import Phase
from core.model import OnPreempt, Partial, Priority, Role
from core.pipelines import BANDS

STEPS = 120
NAMES = ("a", "b", "c")
Move = tuple[float, str, Callable[[], Any]]
"""How likely beside the others, its name, and what it does."""


class Dice:
    """Stands in for Hypothesis where a move asks for a choice."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def draw(self, _: Any) -> bool:
        return self._dice.random() < 0.5


class Settled(CoreWorld):
    """Planning again changes nothing, except while somebody's progress since its shares were computed is too little to
    compute them again."""

    def check(self) -> None:
        books = self.state.ledger.books.values()
        if any(0 < book.planned_at - book.open_demand <= book.open_target // BANDS for book in books):
            self.state.ledger.check()
        else:
            super().check()


class Walk:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = Core()
        self.machine.gpus = self.dice.choice((1, 2, 2, 4))
        self.machine.world = Settled(self.machine.gpus)
        self.machine.joined, self.machine.lost_nodes = {}, set()
        self.machine.pick = lambda items, data: items[self.dice.randrange(len(items))]  # type: ignore[method-assign]
        self.faults = self.dice.random() > 0.3
        self.made: Counter[str] = Counter()

    def run(self) -> None:
        for _ in range(STEPS):
            self.machine.forget_dead()
            moves = list(self.moves())
            [(_, name, move)] = self.dice.choices(moves, weights=[weight for weight, _, _ in moves])
            self.made[name] += 1
            move()
            self.machine.nothing_is_shrunk_for_a_grant_that_cannot_be_completed()
            self.machine.a_routable_engine_is_never_behind_its_bound_at_opening()
        heal(self.machine)

    def moves(self) -> Iterator[Move]:
        machine, world = self.machine, self.machine.world
        if world.pending:
            yield 30, "end", self.end
        yield 2, "sleep", lambda: machine.sleep(self.dice.choice((0.5, 5, 20, 100)))
        for name in NAMES:
            if machine.book(name) is None:
                yield 3, "join", lambda name=name: self.join(name)
            elif machine.alive(name):
                yield from self.moves_of(name)

    def moves_of(self, name: str) -> Iterator[Move]:
        machine, world, book = self.machine, self.machine.world, self.machine.book(name)
        dice, ready = Dice(self.dice), book.phase is Phase.READY
        idle = not book.requests and not book.leases
        if world.leases.get(name):
            yield 5, "release", lambda: machine.release(name=name)
            if ready:
                yield 2, "release_and_ask", lambda: machine.release_and_ask(name=name)
        if book.requests:
            yield 1, "cancel", lambda: machine.cancel(name=name)
        if idle and book.phase is Phase.ADMITTED:
            yield 5, "initialise", lambda: world.ask(name, Role.ACTOR_TRAIN, Priority.INITIALIZATION)
        if not ready:
            return
        if idle:
            yield 3, "ask", lambda: machine.ask(name=name, log_probs=dice.draw(None))
        if len(world.batches.get(name, {})) < 2:
            yield 4, "open", lambda: machine.open(name=name, wanted=self.dice.randint(1, 6))
        if book.open_demand and world.serving(name):
            yield 10, "complete", lambda: machine.complete(data=None, name=name)
        if any(delivered == target for target, delivered in world.batches.get(name, {}).values()):
            yield 4, "close", lambda: machine.close(name=name)
        yield 1, "drop_stale", lambda: machine.drop_stale(name=name, dropped=1)
        yield 1, "publish", lambda: machine.publish(name=name)
        yield 2, "repeat_state", lambda: machine.repeat_state(data=dice, name=name, lose=self.dice.randint(0, 3))
        yield 1, "say_again", lambda: machine.say_again(name=name)
        yield 1, "say_too_early", lambda: machine.say_too_early(name=name)
        yield 1, "release_stale", lambda: machine.release_stale(name=name, epoch=self.dice.randint(0, 30))
        yield 1, "release_rollout", lambda: machine.release_rollout(name=name)
        if self.faults:
            rank = self.dice.randrange(len(book.engines))
            yield 1, "suspect", lambda: machine.suspect(name=name, rank=rank)
            yield 0.3, "leave", lambda: machine.leave(name=name)
            yield 0.3, "trainer_fails", lambda: machine.trainer_fails(name=name)

    def end(self) -> None:
        """Some action ends. A grant that was told twice, and is used and released by now, is refused like by a port."""
        world = self.machine.world
        action = self.dice.choice(list(world.pending.values()))
        how = self.dice.choices(("done", "failed", "unknown"), weights=(20, self.faults, self.faults))[0]
        if isinstance(action, actions.GrantLease):
            how = "done" if action.epoch in world.state.ledger.leases else "failed"
        world.end(action, how)

    def join(self, name: str) -> None:
        gpus = range(self.machine.gpus)
        tp = self.dice.choice([tp for tp in (1, 1, 2) if tp <= len(gpus)])
        ranks = self.dice.sample(range(len(gpus) // tp), self.dice.randint(1, len(gpus) // tp))
        infer = tuple(gpu for rank in sorted(ranks) for gpu in range(rank * tp, rank * tp + tp))
        one = spec(
            name, (self.dice.choice(gpus),), infer, tp, staleness=self.dice.randint(0, 1),
            on_preempt=self.dice.choice(list(OnPreempt)), partial=self.dice.choice(list(Partial)),
        )  # fmt: skip
        if self.machine.world.join(one) is None:
            self.machine.joined[name] = one
            self.machine.world.ask(name, Role.ACTOR_TRAIN, Priority.INITIALIZATION)


@settings(max_examples=100, deadline=None, derandomize=True, database=None, phases=[Phases.generate])
@given(seed=st.integers(0, 2**32))
def test_on_a_walk_every_plan_is_final_the_books_add_up_and_in_the_end_everybody_is_served(seed: int) -> None:
    Walk(seed).run()


def test_a_few_walks_make_every_move() -> None:
    made: Counter[str] = Counter()
    for seed in range(30):
        walk = Walk(seed)
        walk.run()
        made += walk.made
    wanted = {"release_and_ask", "cancel", "repeat_state", "drop_stale", "close", "complete", "suspect", "leave"}
    assert {name for name in wanted if made[name] >= 5} == wanted, made
