"""Hypothesis drives the pure core through everything that can happen, in any order.

After every event: S1 and the books (`Ledger.check`), and planning again changes nothing. At the end the faults stop,
and whoever has demand and an engine that could serve it must be served, in turns if need be (L1, L2, L3).
"""

import os
from typing import Any

import pytest
from core_world import LIMITS, MEMORY, CoreWorld, spec
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Phases
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core import actions, events
from core.errors import Displaced
from core.ledger import EngineState, Hold, Phase
from core.model import DemandPolicy, OnPreempt, Partial, PipelineState, Priority, RequestState, Role

NAMES = ("a", "b", "c", "d")

# TURNSTILE_EXAMPLES=N looks for N new histories instead of repeating the same ones; a bug found that way shrinks for
# minutes, unless TURNSTILE_NO_SHRINK says that any counterexample will do.
EXAMPLES = os.environ.get("TURNSTILE_EXAMPLES")
settings.register_profile(
    "machine",
    deadline=None,
    stateful_step_count=60,
    max_examples=int(EXAMPLES or 120),
    derandomize=EXAMPLES is None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[phase for phase in Phases if phase is not Phases.shrink or "TURNSTILE_NO_SHRINK" not in os.environ],
)


@st.composite
def specs(draw: Any, name: str, gpus: int, gpus_per_node: int) -> Any:
    """A pipeline on a random part of the cluster."""
    tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if tp <= gpus_per_node]))
    bundles = [tuple(range(i, i + tp)) for i in range(0, gpus - tp + 1, tp)]
    chosen = draw(st.lists(st.sampled_from(bundles), min_size=1, unique=True).map(sorted))
    infer = tuple(gpu for bundle in chosen for gpu in bundle)
    train = tuple(sorted(draw(st.sets(st.integers(0, gpus - 1), min_size=1, max_size=min(2, gpus)))))
    return spec(
        name,
        train,
        infer,
        tp,
        on_preempt=draw(st.sampled_from(OnPreempt)),
        partial=draw(st.sampled_from(Partial)),
        staleness=draw(st.integers(0, 1)),
        memory=MEMORY,
    )


class Core(RuleBasedStateMachine):
    """Random pipelines, clients with strange habits, and a world that fails."""

    policy = DemandPolicy.BATCH

    @initialize(gpus=st.sampled_from([1, 2, 4]), nodes=st.sampled_from([1, 1, 2]))
    def begin(self, gpus: int, nodes: int) -> None:
        self.gpus = gpus
        self.world = CoreWorld(gpus, self.policy, nodes if gpus % nodes == 0 and gpus // nodes != 1 else 1)
        self.joined: dict[str, Any] = {}
        self.lost_nodes: set[int] = set()

    # --- helpers ---------------------------------------------------------------------------------------

    def book(self, name: str) -> Any:
        return self.world.state.ledger.books.get(name)

    def alive(self, name: str) -> bool:
        book = self.book(name)
        return book is not None and book.alive

    def forget_dead(self) -> None:
        """A client learns that its pipeline has failed."""
        for name in NAMES:
            if not self.alive(name):
                self.world.leases.pop(name, None)
                self.world.batches.pop(name, None)

    def pick(self, items: list[Any], data: Any) -> Any:
        return items[data.draw(st.integers(0, len(items) - 1))]

    # --- clients ---------------------------------------------------------------------------------------

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def join(self, data: Any, name: str) -> None:
        if self.book(name) is None:
            self.join_anew(data, name)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def join_under_a_used_name(self, data: Any, name: str) -> None:
        """Somebody else, once the pipeline is over; before that it is told that it cannot, and nothing happens."""
        before = self.book(name)
        if before is None:
            return
        if before.alive:
            late = events.PipelineRegistered(pipeline=name, seq=0, life=before.life + 1, spec=before.spec)
            decision = self.world.feed(late)
            assert isinstance(decision.replies[-1].error, Displaced) and not decision.actions
            return
        self.world.new_client(name)
        self.join_anew(data, name)
        if self.book(name) is before:  # its workers are still being stopped
            assert before.stop > 0 or before.clearing

    def join_anew(self, data: Any, name: str) -> None:
        one = data.draw(specs(name, self.gpus, self.world.state.ledger.cluster.gpus_per_node))
        if self.world.join(one) is None:
            self.joined[name] = one
            self.world.ask(name, Role.ACTOR_TRAIN, Priority.INITIALIZATION)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def hear_an_echo(self, data: Any, name: str) -> None:
        """Anything that was ever said under that name arrives once more, whoever said it."""
        said = [event for _, event in self.world.log if isinstance(event, events.Message) and event.pipeline == name]
        if not said:
            return
        before = self.book(name)
        decision = self.world.feed(self.pick(said, data))
        assert not decision.actions
        if before is not None:
            assert self.book(name) is before

    @rule(name=st.sampled_from(NAMES), lost=st.booleans())
    def give_up_before_being_heard(self, name: str, lost: bool) -> None:
        """The registration is on its way when its client is gone; when it arrives, nobody is there to speak for it."""
        before = self.book(name)
        if before is not None and before.alive:
            return
        self.world.new_client(name)
        life = self.world.life[name]
        gone = events.ClientLost(pipeline=name, life=life, reason="silence")
        self.world.feed(gone if lost else events.PipelineLeft(pipeline=name, seq=1, life=life))
        late = events.PipelineRegistered(pipeline=name, seq=0, life=life, spec=spec(name))
        assert not self.world.feed(late).actions and self.book(name) is before
        self.world.new_client(name)

    @rule(name=st.sampled_from(NAMES))
    def register_again(self, name: str) -> None:
        if self.alive(name) and name in self.joined:
            before = self.book(name)
            assert self.world.say(events.PipelineRegistered, name, spec=self.joined[name]) is None
            assert self.book(name) is before

    @rule(name=st.sampled_from(NAMES))
    def register_otherwise(self, name: str) -> None:
        if self.alive(name) and self.book(name).phase is Phase.READY:
            other = spec(name, (0,), (0,), min_residence=1)
            assert self.world.say(events.PipelineRegistered, name, spec=other) is not None
            assert self.book(name).spec != other

    @rule(name=st.sampled_from(NAMES), wanted=st.integers(1, 6))
    def open(self, name: str, wanted: int) -> None:
        if self.alive(name) and len(self.world.batches.get(name, {})) < 2:
            self.world.open(name, wanted)
            self.world.say(events.RolloutSignalled, name, batch=self.world.next_batch[name] - 1)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def complete(self, data: Any, name: str) -> None:
        if self.alive(name) and self.book(name).open_demand and self.world.serving(name):
            self.world.complete(name, self.pick(self.world.serving(name), data))

    @rule(name=st.sampled_from(NAMES), dropped=st.integers(1, 2))
    def drop_stale(self, name: str, dropped: int) -> None:
        """Delivered trajectories turn out too old: their demand comes back."""
        if not self.alive(name):
            return
        for number, batch in self.world.batches.get(name, {}).items():
            if batch[1] >= dropped:
                batch[1] -= dropped
                self.world.say(
                    events.DemandChanged, name, batch=number, target=batch[0], delivered=batch[1], reason="stale"
                )
                return

    @rule(name=st.sampled_from(NAMES))
    def close(self, name: str) -> None:
        if self.alive(name) and self.world.batches.get(name):
            self.world.close(name)

    @rule(name=st.sampled_from(NAMES), log_probs=st.booleans())
    def ask(self, name: str, log_probs: bool) -> None:
        if self.alive(name) and self.book(name).phase is Phase.READY and len(self.book(name).requests) < 2:
            self.world.ask(name, priority=Priority.OLD_LOG_PROBS if log_probs else Priority.ACTOR_TRAINING)

    @rule(name=st.sampled_from(NAMES), role=st.sampled_from(Role), priority=st.sampled_from(Priority))
    def ask_nonsense(self, name: str, role: Role, priority: Priority) -> None:
        """Whatever it is, it is answered; if it is refused nothing changes (`check` sees to the rest)."""
        if self.alive(name):
            before = len(self.book(name).requests)
            if self.world.ask(name, role, priority) is not None:
                assert len(self.book(name).requests) == before

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name: str) -> None:
        if self.alive(name) and self.book(name).requests:
            number = max(self.book(name).requests)
            self.world.say(events.RequestCancelled, name, request=number)
            assert number not in self.book(name).requests

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        self.forget_dead()
        if self.alive(name) and self.world.leases.get(name):
            if self.book(name).phase is Phase.ADMITTED:
                self.world.say(events.WeightsPublished, name, version=0)
            assert self.world.release(name) is None

    @rule(name=st.sampled_from(NAMES), epoch=st.integers(0, 50))
    def release_stale(self, name: str, epoch: int) -> None:
        if self.alive(name) and epoch not in self.book(name).leases:
            assert self.world.say(events.LeaseReleased, name, epoch=epoch) is not None

    @rule(name=st.sampled_from(NAMES))
    def release_and_ask(self, name: str) -> None:
        self.forget_dead()
        if self.alive(name) and self.book(name).phase is Phase.READY and self.world.leases.get(name):
            epoch = min(self.world.leases[name])
            self.world.requests[name] += 1
            refused = self.world.say(
                events.ReleasedAndRequested, name, epoch=epoch, request=self.world.requests[name],
                role=Role.ACTOR_TRAIN, priority=Priority.ACTOR_TRAINING,
            )  # fmt: skip
            if refused is None:
                del self.world.leases[name][epoch]
            else:
                assert epoch in self.book(name).leases

    @rule(name=st.sampled_from(NAMES))
    def publish(self, name: str) -> None:
        if self.alive(name) and self.book(name).phase is Phase.READY:
            self.world.say(events.WeightsPublished, name, version=self.book(name).published + 1)

    @rule(name=st.sampled_from(NAMES))
    def release_rollout(self, name: str) -> None:
        if self.alive(name) and not self.world.batches.get(name):
            self.world.say(events.RolloutReleased, name)
            assert not self.world.up(name)

    @rule(name=st.sampled_from(NAMES), rank=st.integers(0, 3))
    def suspect(self, name: str, rank: int) -> None:
        if self.alive(name):
            self.world.say(events.EngineSuspected, name, dp_rank=rank, reason="no answer")

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        if self.book(name) is not None and self.book(name).phase is not Phase.LEFT:
            self.world.say(events.PipelineLeft, name)
            self.forget_dead()
            assert not self.book(name).leases
            assert not self.book(name).requests

    @rule(name=st.sampled_from(NAMES))
    def say_again(self, name: str) -> None:
        """A late or doubled message changes nothing."""
        if self.book(name) is None:
            return
        book = self.book(name)
        decision = self.world.feed(
            events.BatchOpened(pipeline=name, seq=book.seq, life=book.life, batch=99, target=99)
        )
        assert not decision.actions
        assert not decision.notes

    @rule(name=st.sampled_from(NAMES))
    def say_too_early(self, name: str) -> None:
        """A message with a gap before it is not taken, and not acknowledged."""
        if self.book(name) is not None:
            seq, life = self.book(name).seq + 2, self.book(name).life
            decision = self.world.feed(events.BatchOpened(pipeline=name, seq=seq, life=life, batch=99, target=99))
            assert not decision.actions
            assert not decision.replies

    @rule(data=st.data(), name=st.sampled_from(NAMES), lose=st.integers(0, 3))
    def repeat_state(self, data: Any, name: str, lose: int) -> None:
        """Some messages were lost; the whole state comes instead, and afterwards the books agree with the client."""
        self.forget_dead()
        if not self.alive(name) or self.book(name).phase is not Phase.READY:
            return
        world, book = self.world, self.book(name)
        world.seq[name] += lose
        waiting = tuple(
            RequestState(request=r.number, role=r.role, priority=r.priority) for r in book.requests.values()
        )
        if waiting and data.draw(st.booleans()):
            waiting = waiting[1:]  # one was cancelled, and the message lost
        undelivered = {lease.request for lease in book.leases.values()} - {
            grant.request for grant in world.leases.get(name, {}).values()
        }
        waiting += tuple(
            RequestState(request=lease.request, role=lease.role, priority=lease.priority)
            for lease in book.leases.values()
            if lease.request in undelivered
        )
        state = PipelineState(
            batches=tuple(
                events_batch(number, target, delivered)
                for number, (target, delivered) in sorted(world.batches.get(name, {}).items())
            ),
            opened_through=world.next_batch.get(name, 0) - 1,
            waiting=waiting,
            leases=tuple(world.leases.get(name, {})),
            requests_through=world.requests.get(name, -1),
            published=book.published,
            signals=book.signals,
            admission=True,
        )
        assert world.say(events.StateResent, name, state=state) is None
        assert {n: [b.target, b.delivered] for n, b in book.batches.items()} == world.batches.get(name, {})
        assert sorted(book.requests) + sorted(undelivered) == sorted(r.request for r in waiting) or undelivered

    # --- the world -------------------------------------------------------------------------------------

    @rule(data=st.data(), how=st.sampled_from(["done"] * 6 + ["failed", "unknown"]))
    def end(self, data: Any, how: str) -> None:
        ready = [a for a in self.world.pending.values() if how == "done" or not isinstance(a, actions.GrantLease)]
        if ready:
            self.world.end(self.pick(ready, data), how)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(number=st.integers(10_000, 20_000))
    def end_what_never_was(self, number: int) -> None:
        assert not self.world.feed(events.ActionDone(action=number)).actions

    @rule(seconds=st.sampled_from([0.5, 5, 20, 100, 700]))
    def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def engine_dies(self, data: Any, name: str) -> None:
        if self.alive(name) and self.book(name).phase is Phase.READY:
            rank = data.draw(st.integers(0, len(self.book(name).engines) - 1))
            self.world.feed(events.EngineDied(pipeline=name, dp_rank=rank, reason="it died"))

    @rule(name=st.sampled_from(NAMES))
    def trainer_fails(self, name: str) -> None:
        if self.alive(name):
            self.world.feed(events.TrainerFailed(pipeline=name, reason="it died"))
            assert not self.alive(name)

    @rule(name=st.sampled_from(NAMES))
    def client_is_lost(self, name: str) -> None:
        if self.alive(name):
            earlier = self.world.feed(events.ClientLost(pipeline=name, life=self.book(name).life - 1, reason="silence"))
            assert self.alive(name) and not earlier.actions
            self.world.feed(events.ClientLost(pipeline=name, life=self.book(name).life, reason="silence"))
            assert not self.alive(name)

    @precondition(lambda self: self.world.state.ledger.cluster.nodes > 1 and not self.lost_nodes)
    @rule()
    def node_leaves(self) -> None:
        self.lost_nodes.add(1)
        self.world.feed(events.NodeLeft(node=1))

    # --- always ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_shrunk_for_a_grant_that_cannot_be_completed(self) -> None:
        ledger = self.world.state.ledger if hasattr(self, "world") else None
        for request in ledger.waiting if ledger else ():
            assert not any(ledger.gpus[gpu].promised is request for gpu in request.gpus)

    @invariant()
    def a_routable_engine_is_never_behind_its_bound_at_opening(self) -> None:
        for book in self.world.state.ledger.books.values() if hasattr(self, "world") else ():
            for engine in book.engines:
                assert not engine.routable or 0 <= engine.version <= book.published

    @invariant()
    def nobody_holds_a_lease_for_longer_than_its_limit(self) -> None:
        for lease in self.world.state.ledger.leases.values() if hasattr(self, "world") else ():
            assert self.world.now - lease.granted_at <= LIMITS.hold

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        heal(self)


def events_batch(number: int, target: int, delivered: int) -> Any:
    from core.model import BatchState

    return BatchState(batch=number, target=target, delivered=delivered)


def heal(machine: Core) -> None:
    """Faults are over: everybody who can be served must be, within a number of turns."""
    world = machine.world
    starving: dict[str, int] = {}
    for _ in range(400):
        machine.forget_dead()
        world.settle()
        for name in NAMES:
            if not machine.alive(name):
                continue
            for _ in range(len(world.leases.get(name, {}))):
                if machine.book(name).phase is Phase.ADMITTED:
                    world.say(events.WeightsPublished, name, version=0)
                world.release(name)
        world.settle()
        for name in NAMES:
            if machine.alive(name) and machine.book(name).open_demand and world.serving(name):
                world.complete(name)
                starving.pop(name, None)
        world.sleep(30)
        # One that is not initialised and does not ask to be was refused (a GPU of it is lost), and was told so.
        busy = [
            n for n in NAMES
            if machine.alive(n)
            and (machine.book(n).requests or (machine.book(n).phase is Phase.READY and machine.book(n).open_demand))
        ]  # fmt: skip
        if not busy:
            break
    else:
        from core.waits import explain

        raise AssertionError(f"after 400 rounds without faults somebody still waits:\n{explain(world.state)}")
    for gpu in world.state.ledger.gpus:
        assert gpu.hold is not Hold.CLEARING, f"GPU {gpu.id} is never free again"
    for book in world.state.ledger.books.values():
        for engine in book.engines:
            assert engine.state not in (EngineState.WAKING, EngineState.SYNCING, EngineState.DRAINING)


class FloorCore(Core):
    policy = DemandPolicy.FLOOR


TestCore = Core.TestCase
TestCore.settings = settings.get_profile("machine")
TestFloor = FloorCore.TestCase
TestFloor.settings = settings.get_profile("machine")


def test_the_machine_can_fail() -> None:
    """A check that is broken on purpose is seen: the machine looks at every event."""
    world = CoreWorld()
    world.ready(spec("a"))
    world.state.ledger.gpus[0].hold = Hold.HELD
    with pytest.raises(Exception, match="GPU 0 is held with 0 tenants"):
        world.sleep(0) or world.feed(events.TimerFired(timer="none", generation=0))


