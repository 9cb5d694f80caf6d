"""Small worlds proved whole, and the prover proved honest: packing loses nothing, and what is wrong is found."""

import random
import signal
import subprocess
import sys
import time
from array import array
from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from core import actions, events, planner, scheduler
from core.errors import ConfigError, InvariantBroken
from core.model import DemandPolicy, Priority, Role
from core.verify import client, liveness, moves, search
from core.verify.node import Node
from core.verify.packing import Codec
from core.verify.proof import BROKEN, PROVED, STUCK, UNFINISHED, prove
from core.verify.search import Graph, resume, save
from core.verify.symmetry import Symmetry, Unfolded
from core.verify.world import Mapping, Start, World, admitted
from scenarios import verify
from tests.core_world import CoreWorld, spec

WHOLE = 10**9
FAULTY = World(pipelines=3, target=2, faults=3)
WIDE = World(gpus=4, tp=(1, 2), target=2, staleness=1, faults=1)


# --- packing ----------------------------------------------------------------------------------------------


def nameless(move: moves.Move) -> moves.Move:
    return move._replace(number=0)


@pytest.mark.parametrize(
    "world",
    [World(target=2), FAULTY, WIDE, World(pipelines=3, demand=DemandPolicy.FLOOR, faults=2), World(coarse=True)],
    ids=["plain", "faulty", "wide", "floor", "coarse"],
)
def test_a_state_that_was_never_packed_behaves_like_its_packed_twin(world: World) -> None:
    codec = Codec(world)
    for seed in range(6):
        draw = random.Random(f"{seed}:walk")
        node = Node(admitted(world))
        node.faults = world.faults
        for _ in range(150):
            key = codec.pack(node)
            twins = {nameless(move): move for move in moves.enabled(world, codec.load(key))}
            assert codec.pack(codec.load(key)) == key
            able = moves.enabled(world, node)
            assert sorted(map(nameless, able)) == sorted(twins)
            if not able:
                break
            move = draw.choice(able)
            twin = codec.load(key)
            moves.apply(world, twin, twins[nameless(move)])
            after = codec.pack(twin)
            if move.kind == "tick":
                assert codec.ticked(key) == after
            moves.apply(world, node, move)
            assert codec.pack(node) == after, move


# --- symmetry ---------------------------------------------------------------------------------------------

ALIKE = [
    World(pipelines=3, target=2, staleness=1, faults=2),
    World(pipelines=3, gpus=3, mapping=Mapping.FULL, target=5, faults=1),
    World(pipelines=4, mapping=Mapping.FULL, target=2, faults=2, demand=DemandPolicy.FLOOR),
    World(gpus=4, tp=(2,), mapping=Mapping.FULL, target=5, faults=2),
]
ON_GPUS = ("memory", "memory_missing", "given_up")


@pytest.mark.parametrize("world", ALIKE, ids=lambda world: f"{world.pipelines}x{world.gpus}-{world.mapping}")
@settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_deciding_is_the_same_whichever_of_several_like_pipelines_is_which(world: World, seed: int) -> None:
    codec, symmetry, draw = Codec(world), Symmetry(world), random.Random(seed)
    assert len(symmetry.orders) > 1
    node = Node(admitted(world))
    node.faults = world.faults
    for _ in range(120):
        key, order = codec.pack(node), draw.choice(symmetry.orders)
        turned = symmetry.permuted(key, order)
        able = moves.enabled(world, node)
        if not able:
            break
        move = draw.choice(able)
        who = move.who if move.kind in ON_GPUS or move.who < 0 else order.index(move.who)
        twin = codec.load(turned)
        [same] = [m for m in moves.enabled(world, twin) if m[:3] == (move.kind, who, move.rank) and m.cost == move.cost]
        moves.apply(world, twin, same)
        after = codec.pack(twin)
        moves.apply(world, node, move)
        assert after == symmetry.permuted(codec.pack(node), order), move


def test_the_state_kept_is_one_of_its_orbit_and_the_permutation_leads_there() -> None:
    world = ALIKE[1]
    codec, symmetry, draw = Codec(world), Symmetry(world), random.Random(1)
    node = Node(admitted(world))
    kept_as_they_are = 0
    for _ in range(300):
        key = codec.pack(node)
        kept, turn = symmetry.canonical(key)
        assert symmetry.permuted(key, symmetry.orders[turn]) == kept
        assert {symmetry.canonical(symmetry.permuted(key, order))[0] for order in symmetry.orders} == {kept}
        kept_as_they_are += not turn
        moves.apply(world, node, draw.choice(moves.enabled(world, node)))
    assert 0 < kept_as_they_are < 300


@pytest.mark.parametrize(
    "world", [World(), World(gpus=4, tp=(1, 2)), World(pipelines=3, start=Start.INCIDENT), World(symmetry=False)]
)
def test_pipelines_that_differ_are_not_taken_for_each_other(world: World) -> None:
    assert Symmetry(world).orders == [tuple(range(world.pipelines))]


def test_orbits_unfold_to_the_whole_graph() -> None:
    """As many states and transitions of each class, and the same verdict."""
    whole, orbits = Graph(World(gpus=1, pipelines=2, symmetry=False)), Graph(World(gpus=1, pipelines=2))
    for graph in (whole, orbits):
        search.explore(graph, WHOLE)
    unfolded = Unfolded(orbits)
    symmetry = orbits.symmetry
    fixed = sum(symmetry.permuted(key, (1, 0)) == key for key in orbits.keys)
    assert 2 * len(orbits.keys) - fixed == len(whole.keys)
    assert fixed < 5, "then the graphs are as good as equal"
    found, wanted = Counter(unfolded.classes), Counter(whole.classes)
    assert set(found) == set(wanted)
    assert all(0 <= found[kind] - wanted[kind] <= 4 * fixed for kind in found)
    assert liveness.first_stuck(unfolded) is None and liveness.first_stuck(whole) is None


def test_a_wait_that_never_ends_is_found_among_orbits_and_told_by_name() -> None:
    for symmetry in (False, True):
        world = World(gpus=1, pipelines=2, demand=DemandPolicy.SIGNAL, symmetry=symmetry)
        verdict = prove(Graph(world), WHOLE)
        assert verdict.outcome == STUCK
        assert verdict.story, "the shortest run, with everybody's name"


# --- proofs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world",
    [
        World(gpus=1, pipelines=1),
        World(gpus=2, pipelines=1),
        World(gpus=1, pipelines=2),
        World(gpus=2, pipelines=1, mapping=Mapping.FULL, target=2, faults=1),
        World(gpus=1, pipelines=1, faults=2),
    ],
    ids=lambda world: f"{world.pipelines}x{world.gpus}-{world.mapping}-{world.faults}-faults",
)
def test_a_small_world_is_proved_whole(world: World) -> None:
    verdict = prove(Graph(world), WHOLE)
    assert verdict.outcome == PROVED, verdict.story


def test_the_incident_s_world_is_proved_whole_under_batch_and_the_proof_is_not_empty() -> None:
    world = World(start=Start.INCIDENT, coarse=True)
    graph = Graph(world)
    verdict = prove(graph, WHOLE)
    assert verdict.outcome == PROVED, verdict.story
    codec = Codec(world)
    places = {(number, at) for key in graph.keys for number, at in enumerate(codec.load(key).at)}
    silent = {client.FIRST_SIGNAL, client.SIGNAL, client.GONE}
    assert places == {(number, at) for number in range(2) for at in set(client.SAYS) - silent}
    assert {kind // moves.CLASSES for kind in graph.classes if kind != moves.UNFAIR} == {0, 1, 2}
    completions = {number * moves.CLASSES + moves.COMPLETES + rank for number in range(2) for rank in range(2)}
    assert completions <= set(graph.classes), "every engine of everybody completes trajectories"


@pytest.mark.parametrize("start", list(Start))
def test_the_incident_s_deadlock_is_found_under_signal_as_its_shortest_run(start: Start) -> None:
    graph = Graph(World(demand=DemandPolicy.SIGNAL, start=start))
    verdict = prove(graph, WHOLE)
    stuck = liveness.first_stuck(graph)
    assert verdict.outcome == STUCK
    assert stuck is not None and not stuck.wait.lease and not stuck.cycle, "it is doomed, not merely unlucky"
    told = "\n".join(verdict.story)
    assert told.count("asks to be initialised") == 2 and "   7. " not in told
    assert "its signal is consumed" in told
    assert "under the policy `signal` the scheduler sees no demand" in told


def test_the_deadlock_is_named_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--demand", "signal", "--start", "incident", "--quiet"]) == 3
    assert "somebody may wait for ever" in capsys.readouterr().out


# --- the prover sees what is wrong ------------------------------------------------------------------------


def test_a_wake_on_a_gpu_in_use_is_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at memory, a sleeping engine's claim would be enough."""
    monkeypatch.setattr("core.ledger.Ledger.clear", _clear_at_once)
    verdict = prove(Graph(World(gpus=1, pipelines=2)), WHOLE)
    assert verdict.outcome == BROKEN
    assert verdict.story[-1].startswith("broken: ")


def _clear_at_once(ledger, ids, book, why, *, quarantine=False):
    for gpu in ids:
        ledger.gpus[gpu].engine = ledger.gpus[gpu].lease = None
        ledger.gpus[gpu].hold = type(ledger.gpus[gpu].hold).FREE
    return ()


def test_a_watch_of_an_earlier_tenancy_that_counts_is_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = scheduler._memory

    def any_watch(state, action, clearing, failure, free):
        state.ledger.gpus[clearing.gpu].watch = action.action
        judged(state, action, clearing, failure, free)

    monkeypatch.setattr(scheduler, "_memory", any_watch)
    verdict = prove(Graph(World(gpus=1, pipelines=1, faults=2)), WHOLE)
    assert verdict.outcome == BROKEN
    assert "nobody waits for AwaitMemory of GPU 0 any more" in verdict.story[-1]


def test_a_gpu_in_quarantine_that_is_promised_is_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The books' own check does not see it, for it asks what is usable."""
    monkeypatch.setattr("core.ledger.Gpu.usable", True)
    verdict = prove(Graph(World(gpus=1, pipelines=1, faults=2)), WHOLE)
    assert verdict.outcome == BROKEN
    assert "GPU 0 is quarantined" in verdict.story[-1] and "promised to" in verdict.story[-1]


def test_a_pipeline_that_is_left_out_is_found_starving(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planner._demanders
    monkeypatch.setattr(planner, "_demanders", lambda *given: [book for book in whole(*given) if book.id != "p2"])
    monkeypatch.setattr("core.verify.rules._no_gpu_idles", lambda node: None)
    verdict = prove(Graph(World(gpus=1, pipelines=2)), WHOLE)
    assert verdict.outcome == STUCK
    assert any("p2 never gets a rollout engine" in line for line in verdict.story)


def test_residence_without_turns_is_found_starving_in_a_fair_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that change hands as soon as they serve, whatever was completed: nobody need ever finish anything."""
    monkeypatch.setattr("core.rollouts.turn_end", _as_soon_as_it_serves)
    monkeypatch.setattr("core.verify.rules._nothing_left_to_plan", lambda node: None)
    verdict = prove(Graph(World(gpus=1, pipelines=2)), WHOLE)
    assert verdict.outcome == STUCK
    assert any("goes round and round" in line for line in verdict.story)


def _as_soon_as_it_serves(engine, only, stays: int | None = None):
    return engine.routable_since if engine.routable else None


def ring(classes: list[int]) -> Graph:
    """Two states in a circle, in both of which p1 wants trajectories; a self-loop of each class given at the first."""
    graph = Graph(World(gpus=1, pipelines=1))
    graph.keys = [b"0", b"1"]
    graph.parents = array("I", [0, 0])
    graph.targets = array("I", [1, *(0 for _ in classes), 0])
    graph.classes = array("B", [30, *classes, 30])
    graph.first_out = array("Q", [0, 1 + len(classes), 2 + len(classes)])
    graph.hungry = array("B", [1, 1])
    graph.asking = array("B", [0, 0])
    return graph


def test_a_circle_from_which_no_way_leads_out_is_doomed() -> None:
    stuck = liveness.first_stuck(ring([]))
    assert stuck is not None and stuck.state == 0 and stuck.cycle == ()


def test_a_move_that_is_possible_now_and_then_may_never_come() -> None:
    """Weak fairness: the trajectory could be completed in one of the two states only."""
    stuck = liveness.first_stuck(ring([moves.COMPLETES]))
    assert stuck is not None and set(stuck.cycle) == {0, 1}


def test_a_move_that_stays_possible_comes_at_last() -> None:
    graph = ring([moves.COMPLETES])
    graph.targets = array("I", [1, 0, 0, 0])
    graph.classes = array("B", [30, moves.COMPLETES, 30, moves.COMPLETES])
    graph.first_out = array("Q", [0, 2, 4])
    assert liveness.first_stuck(graph) is None


def test_a_fault_is_no_way_out() -> None:
    assert liveness.first_stuck(ring([search.FAULT])) is not None


# --- stopping and going on --------------------------------------------------------------------------------


def test_a_search_that_was_stopped_goes_on_to_the_same_graph(tmp_path) -> None:
    world = World(gpus=1, pipelines=2)
    file = tmp_path / "one.search"
    graph = Graph(world)
    assert prove(graph, 1_000).outcome == UNFINISHED
    save(graph, file)
    again = resume(world, file)
    assert prove(again, WHOLE).outcome == PROVED
    at_once = Graph(world)
    search.explore(at_once, WHOLE)
    assert (again.keys, again.targets, again.classes) == (at_once.keys, at_once.targets, at_once.classes)


def test_a_search_that_was_killed_goes_on_from_where_it_last_saved(tmp_path) -> None:
    """Not stopped: killed, so that it can say no goodbye."""
    file = tmp_path / "one.search"
    options = ["--gpus", "1", "--pipelines", "2", "--faults", "1", "--quiet", "--resume", str(file)]
    search_ = subprocess.Popen([sys.executable, "-m", "scenarios.verify", *options, "--save-every", "0"])
    try:
        while not file.exists() and search_.poll() is None:
            time.sleep(0.05)
    finally:
        search_.send_signal(signal.SIGKILL)
        search_.wait()
    world = World(gpus=1, pipelines=2, faults=1)
    again, at_once = resume(world, file), Graph(world)
    known = again.expanded
    assert known > 0 and not again.complete
    search.explore(again, len(again.keys) + 500)
    search.explore(at_once, len(again.keys))
    least = min(again.first_out[-1], at_once.first_out[-1])
    assert least > again.first_out[known], "it has gone on"
    assert again.targets[:least] == at_once.targets[:least] and again.keys[:known] == at_once.keys[:known]


def test_a_search_of_another_world_is_not_taken_up(tmp_path) -> None:
    file = tmp_path / "one.search"
    graph = Graph(World(gpus=1, pipelines=2))
    search.explore(graph, 50)
    save(graph, file)
    with pytest.raises(ConfigError, match="another world"):
        resume(World(gpus=2, pipelines=2), file)
    file.write_bytes(b"no search")
    with pytest.raises(ConfigError, match="no saved search"):
        resume(World(), file)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--gpus", "0"], ["--tp", "3"], ["--tp", "x"], ["--tp", "1,2,1"], ["--faults", "-1"], ["--mapping", "x"],
        ["--resume", "no/such/x"], ["--resume", "."], ["--resume", "x", "--save-every", "-1"],
    ],
)  # fmt: skip
def test_a_world_that_cannot_be_is_refused_in_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = verify.main(wrong)
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out


# --- what it found ----------------------------------------------------------------------------------------


def test_an_engine_on_its_way_up_does_not_take_the_turn_from_the_one_that_serves() -> None:
    """Else each engine could be cut off in favour of the next, and no trajectory would ever be finished."""
    world = CoreWorld()
    world.ready(spec("a", train=(0,)), spec("b", train=(1,)))
    world.open("a", 8)
    a = world.state.ledger.books["a"].engines
    while not a[0].routable:
        world.end(next(act for act in world.pending.values() if getattr(act, "dp_rank", 0) == 0))
    world.sleep(30)  # longer than its residence, shorter than its turn; the other engine is still being woken
    world.open("b", 8)
    assert (a[0].state, a[1].state) == ("awake", "waking")
    world.complete("a", 0)
    assert a[0].state == "draining", "one completed trajectory ends the turn"


def test_an_idle_gpu_given_to_a_hungry_pipeline_does_not_make_its_other_engine_fair_game() -> None:
    """The engine that was promised first keeps the turn; else planning again would take back what was just given."""
    world = CoreWorld()
    world.ready(spec("a"))
    world.open("a", 2)
    a = world.state.ledger.books["a"].engines
    while not a[0].routable:
        world.end(next(act for act in world.pending.values() if getattr(act, "dp_rank", 0) == 0))
    world.complete("a")
    world.complete("a")
    world.close("a")
    world.ask("a")
    world.settle(actions.SleepEngine, actions.AwaitMemory, actions.GrantLease)
    world.open("a", 2)
    world.sleep(420)  # hungry for longer than an initialisation may overtake
    world.join(spec("b"))
    world.ask("b", Role.ACTOR_TRAIN, Priority.INITIALIZATION)
    assert a[1].state == "waking"
    world.release("a")
    assert world.up("a") == [0, 1] and a[1].state == "waking"


def test_a_gpu_whose_quarantine_ends_with_its_pipeline_is_given_to_whoever_waits() -> None:
    world = CoreWorld()
    for name in ("a", "b"):
        world.join(spec(name))
    world.ask("a", Role.ACTOR_TRAIN, Priority.INITIALIZATION)
    world.settle()
    world.release("a")
    world.ask("b", Role.ACTOR_TRAIN, Priority.INITIALIZATION)
    world.end(next(act for act in world.pending.values() if isinstance(act, actions.AwaitMemory)), "failed")
    assert not world.state.ledger.books["a"].alive
    world.settle()
    assert world.holder(0) == world.holder(1) == "b"


def test_an_initialisation_that_was_cancelled_may_be_asked_for_again() -> None:
    """The grant had been delivered, but the client never began: it is not initialised."""
    world = CoreWorld()
    world.join(spec("a"))
    world.ask("a", Role.ACTOR_TRAIN, Priority.INITIALIZATION)
    world.settle()
    assert world.say(events.RequestCancelled, "a", request=0) is None
    world.settle()
    assert world.ask("a", Role.ACTOR_TRAIN, Priority.INITIALIZATION) is None


def test_packing_refuses_a_change_nobody_planned_for() -> None:
    world = World()
    node = Node(admitted(world))
    node.state.replan = True
    with pytest.raises(InvariantBroken, match="not planned for"):
        Codec(world).pack(node)
