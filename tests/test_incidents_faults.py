"""Incidents I19 to I38: races and the ledger, memory, weights. The core by hand where the order is the point."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from core_world import MEMORY, CoreWorld, spec
from incident_world import Run, incident, pipeline, world

from core import actions, bounds, events
from core.config import Durations, Fault
from core.errors import Conflict, RequestError, StaleLease, TopologyError, UnknownName
from core.ledger import Hold, Phase
from core.model import OnPreempt, PipelineState, Priority, RequestState, Role
from core.topology import check_world
from core.units import gib, ns
from scenarios import catalogue
from tests.worlds import SimWorld, in_sim, make_scenario


def with_faults(name: str, *faults: Fault) -> Any:
    return msgspec.structs.replace(catalogue.load(name), faults=faults, expect=None)


def fault(kind: str, at: float, **fields: Any) -> Fault:
    return Fault(at=ns(at), kind=kind, **fields)


# --- races and the ledger ------------------------------------------------------------------------------------


def in_the_middle(steps: int, on_preempt: OnPreempt = OnPreempt.ABORT, gpus: int = 2, tp: int = 1) -> CoreWorld:
    """A and B after `steps` outcomes: A holds engines, B's training takes one, and A wants to train."""
    core = CoreWorld(gpus)
    mapped = tuple(range(gpus))
    left = steps

    def some() -> None:
        nonlocal left
        while left > 0 and core.pending:
            left -= 1
            core.end(next(iter(core.pending.values())))

    core.ready(spec("a", mapped[:tp], mapped, tp, on_preempt=on_preempt), spec("b", mapped[-tp:], mapped, tp))
    core.open("a", 20)
    some()
    core.open("b", 20)
    core.sleep(25)
    core.ask("b")
    some()
    if core.serving("a"):
        core.complete("a")
    core.say(events.WeightsPublished, "a", version=1)
    core.ask("a")
    some()
    return core


def all_steps(**how: Any) -> range:
    """Every number of outcomes after which that life can be cut off."""
    count = 0
    while in_the_middle(count, **how).pending:
        count += 1
    return range(count + 1)


ENDS: dict[str, Callable[[CoreWorld], Any]] = {
    "leaves": lambda core: core.say(events.PipelineLeft, "a"),
    "its client dies": lambda core: core.feed(events.ClientLost(pipeline="a", reason="silence")),
    "its trainer dies": lambda core: core.feed(events.TrainerFailed(pipeline="a", reason="it died")),
}


@pytest.mark.parametrize("gpus, tp", [(2, 1), (4, 2)])
@pytest.mark.parametrize("end", ENDS)
def test_i19_whenever_a_pipeline_ends_its_parts_are_dropped_and_the_others_go_on(end: str, gpus: int, tp: int):
    for steps in all_steps(gpus=gpus, tp=tp):
        for order in ("first", "last"):
            core = in_the_middle(steps, gpus=gpus, tp=tp)
            ENDS[end](core)
            while core.pending:
                core.end(list(core.pending.values())[0 if order == "first" else -1])
            if core.leases.get("b"):
                core.release("b")
                core.settle()
            assert len(core.serving("b")) == gpus // tp, (steps, order)
            assert all(core.holder(gpu) == "b" for gpu in range(gpus)), (steps, order)


def test_i19_a_client_that_dies_in_the_middle_takes_nobody_with_it():
    run = incident("i19")
    died = run.times(events.FaultInjected)[0]
    lost = run.times(events.ClientLost)[0]
    given = [*run.times(actions.WakeEngine, pipeline="a"), *run.times(actions.GrantLease, pipeline="a")]
    assert max(given) < lost
    assert lost - died == 30 and run.pipelines["b"]["trajectories"] == 64


@pytest.mark.parametrize("kind", ["kill_client", "kill_trainer"])
def test_i19_at_no_moment_of_its_life_does_the_end_of_one_stop_the_other(kind: str):
    """One run for each moment: just before, in, and after every stretch between two of A's own events."""
    base = Run(with_faults("i19"))
    moments = sorted({round(at, 3) for at, item in base.log if getattr(item, "pipeline", "") == "a"})
    for at in moments[:: max(1, len(moments) // 14)]:
        run = Run(with_faults("i19", fault(kind, at + 0.01, pipeline="a")))
        assert run.outcome in ("failed", "completed") and run.broken == [], (at, run.broken, run.result.diagnosis)
        assert run.pipelines["b"]["trajectories"] == 64, at


def test_i20_a_planned_release_is_confirmed_only_after_its_own_engines_slept():
    core = CoreWorld(4)
    core.ready(spec("a", (0,), (0, 1)), spec("b", (2,), (2, 3)))
    batch = core.open("a", 20)
    core.open("b", 20)
    core.settle()
    core.say(events.WeightsPublished, "b", version=1)  # B's operations are in flight
    core.say(events.BatchClosed, "a", batch=batch, reason="released")
    core.say(events.RolloutReleased, "a")
    core.settle(actions.SyncEngine, actions.OpenGate)
    assert "ConfirmRelease" not in core.kinds()
    first, second = (a for a in core.pending.values() if isinstance(a, actions.SleepEngine))
    for sleeping in (first, second):
        core.end(sleeping)
        assert "ConfirmRelease" not in core.kinds()  # an acknowledgement is a claim
    watches = [a for a in core.pending.values() if isinstance(a, actions.AwaitMemory)]
    core.end(watches[0])
    assert "ConfirmRelease" not in core.kinds()
    core.end(watches[1])
    assert core.kinds() == ["ConfirmRelease"]
    assert core.serving("b") == [0, 1]


def test_i20_a_release_is_not_confirmed_by_somebody_elses_operation():
    core = CoreWorld(2)
    core.ready(spec("a", (0,), (0,)), spec("b", (1,), (1,)))
    batch = core.open("a", 20)
    core.open("b", 20)
    core.settle()
    core.ask("b")
    core.say(events.BatchClosed, "a", batch=batch, reason="released")
    core.say(events.RolloutReleased, "a")
    mine = next(a for a in core.pending.values() if isinstance(a, actions.SleepEngine) and a.pipeline == "a")
    for action in [a for a in core.pending.values() if a is not mine]:
        core.end(action)
    core.settle(actions.AwaitMemory, actions.GrantLease)
    assert core.holder(1) == "b" and "ConfirmRelease" not in core.kinds()
    core.end(mine)
    core.settle()
    assert core.holder(0) == "free"


@pytest.mark.parametrize("during", [actions.WakeEngine, actions.SyncEngine, actions.OpenGate])
@pytest.mark.parametrize("how", ["done", "failed", "unknown"])
def test_i21_a_release_during_an_expand_leaves_no_ghost_and_no_engine_awake(during: type, how: str):
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,)))
    batch = core.open("a", 20)
    while not isinstance(action := next(iter(core.pending.values())), during):
        core.end(action)
    core.say(events.BatchClosed, "a", batch=batch, reason="released")
    core.say(events.RolloutReleased, "a")
    core.end(action, how)
    core.settle()
    assert core.holder(0) == "free" and not core.up("a")
    assert core.state.ledger.books["a"].releasing is False


@pytest.mark.parametrize("also_promised", [False, True])
def test_i22_the_request_of_a_cancelled_waiter_goes_and_a_retry_is_accepted(also_promised: bool):
    core = CoreWorld(2)
    core.ready(spec("a", (0,), (0,)), spec("b", (0,), (1,)))
    core.ask("a")
    core.settle()
    core.ask("b")
    if also_promised:
        core.release("a")  # its memory is not back: B is promised the GPU, and not granted
        assert core.state.ledger.books["b"].requests[1].promised
    core.say(events.RequestCancelled, "b", request=core.requests["b"])
    if not also_promised:
        core.release("a")
    core.settle()
    assert core.holder(0) == "free" and not core.leases.get("b")
    assert core.ask("b") is None
    core.settle()
    assert core.holder(0) == "b"


def test_i22_a_grant_that_meets_its_cancellation_is_given_back():
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,)))
    core.ask("a")
    core.settle(actions.AwaitMemory)
    (grant,) = (a for a in core.pending.values() if isinstance(a, actions.GrantLease))
    core.say(events.RequestCancelled, "a", request=core.requests["a"])
    core.end(grant, "failed")  # its client does not wait for it any more
    core.settle()
    assert core.holder(0) == "free"


def test_i22_a_cancellation_that_was_lost_is_made_up_for_by_the_next_repetition():
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,)), spec("b", (0,), (0,)))
    core.ask("a")
    core.settle()
    core.ask("b")
    core.seq["b"] += 1  # the cancellation, lost
    state = PipelineState(
        waiting=(RequestState(request=2, role=Role.ACTOR_TRAIN, priority=Priority.ACTOR_TRAINING),),
        requests_through=2, published=0, admission=True,
    )  # fmt: skip
    assert core.say(events.StateResent, "b", state=state) is None
    assert list(core.state.ledger.books["b"].requests) == [2]


@pytest.mark.parametrize(
    "role, priority",
    [
        (Role.CRITIC, Priority.CRITIC_TRAINING),
        (Role.ACTOR_TRAIN, Priority.GENERATION),
        (Role.ACTOR_INFER, Priority.GENERATION),
        (Role.ACTOR_TRAIN, Priority.INITIALIZATION),
    ],
)
def test_i23_a_bad_request_releases_nothing(role: Role, priority: Priority):
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,)))
    core.ask("a")
    core.settle()
    epoch = min(core.leases["a"])
    refused = core.say(events.ReleasedAndRequested, "a", epoch=epoch, request=5, role=role, priority=priority)
    assert isinstance(refused, RequestError)
    assert core.holder(0) == "a" and list(core.state.ledger.leases) == [epoch] and not core.pending
    stale = core.say(
        events.ReleasedAndRequested, "a", epoch=epoch + 9, request=6, role=Role.ACTOR_TRAIN,
        priority=Priority.ACTOR_TRAINING,
    )  # fmt: skip
    assert isinstance(stale, StaleLease) and core.holder(0) == "a"


def test_i24_registering_again_changes_nothing_and_otherwise_is_refused_while_gpus_are_held():
    core = CoreWorld(2)
    mine = spec("a")
    core.ready(mine)
    core.open("a", 20)
    core.settle()
    assert core.say(events.PipelineRegistered, "a", spec=mine) is None
    assert isinstance(core.say(events.PipelineRegistered, "a", spec=spec("a", (0,), (0,))), Conflict)
    echo = core.feed(events.PipelineRegistered(pipeline="a", seq=0, spec=spec("a", (0,), (0,))))
    assert echo.replies[-1].error is None and core.state.ledger.books["a"].spec == mine
    assert core.serving("a") == [0, 1]
    core.say(events.PipelineLeft, "a")
    core.settle()
    core.new_client("a")
    core.ready(spec("a", (1,), (1,)))
    assert core.state.ledger.books["a"].phase is Phase.READY


def test_i25_a_clients_mistake_is_its_own():
    core = CoreWorld(2)
    core.ready(spec("a", (0,), (0,)), spec("b", (1,), (1,)))
    core.open("b", 20)
    core.settle()
    planned = len(core.notes)
    for role, priority, kind in [
        (Role.CRITIC, Priority.CRITIC_TRAINING, UnknownName),
        (Role.ACTOR_TRAIN, Priority.GENERATION, RequestError),
        (Role.REWARD, Priority.ACTOR_TRAINING, UnknownName),
    ]:
        refused = core.ask("a", role, priority)
        assert isinstance(refused, kind) and "a" in str(refused)
    assert isinstance(core.say(events.BatchClosed, "nobody", batch=0, reason="x"), UnknownName)
    assert isinstance(core.say(events.EngineSuspected, "a", dp_rank=7, reason="x"), UnknownName)
    assert {note.kind for note in core.notes[planned:]} == {"rejected"} and not core.pending
    assert {note.pipeline for note in core.notes[planned:]} == {"a"} and core.serving("b") == [0]


def test_i26_a_hung_engine_costs_its_pipeline_a_limit_and_the_other_one_nothing():
    run = incident("i26")
    alone = Run(with_faults("i26"))
    killed = [action.dp_rank for _, action in run.all(actions.KillEngine)]
    assert killed == [0] and len(list(run.all(events.ActionFailed))) >= 1
    steps = [run.times(events.StepCompleted, pipeline="b"), alone.times(events.StepCompleted, pipeline="b")]
    assert steps[0] == steps[1] and len(steps[0]) == 4


@pytest.mark.parametrize(
    "kind", ["kill_engine", "hang_engine", "fail_sync", "false_release", "kill_trainer", "hang_trainer"]
)
@pytest.mark.parametrize("at", [30, 46.3, 57, 63, 71])
def test_i26_whatever_breaks_in_one_pipeline_changes_nothing_for_one_that_shares_nothing(kind: str, at: float):
    rank = {"dp_rank": 1} if "engine" in kind else {}
    run = Run(with_faults("i26", fault(kind, at, pipeline="a", **rank)))
    alone = Run(with_faults("i26"))
    assert run.broken == [] and run.outcome in ("completed", "failed")
    mine, theirs = (
        [(at, item.trajectory, item.segments) for at, item in r.all(events.TrajectoryCompleted, pipeline="b")]
        for r in (run, alone)
    )
    assert mine == theirs and len(mine) == 64


@pytest.mark.parametrize(("prompts", "max_attempts", "patience"), [(1, 1, 1), (1, 2, 1), (1, 4, 3), (3, 4, 1)])
def test_i26_the_bound_knows_how_long_an_engine_may_hang_unsuspected(prompts: int, max_attempts: int, patience: int):
    """Waiting for answers is longer here than all the rest of the bound, which alone would call the pipeline starved.
    One trajectory gets all attempts but one; of several, the second unanswered one is proof."""
    limits = dict.fromkeys(("hold_s", "init_s", "quarantine_s", "turn_s"), 60)
    limits |= {"wake_s": 60} | dict.fromkeys(("sync_s", "sleep_s", "drain_s"), 20)
    alone = world(
        1,
        pipeline(
            "a", [0], [0], steps=1, batch={"prompts": prompts}, limits=limits, min_residence_s=5, reissue_after_s=4000,
            max_attempts=max_attempts, costs={"restart": 30},
        ),
        faults=[{"at": 30, "kind": "hang_engine", "pipeline": "a", "dp_rank": 0}],
    )  # fmt: skip
    spec = alone.jobs[0].spec
    assert bounds.rollout(spec, [spec], [spec]) - spec.suspicion < ns(4000)
    run = Run(alone)
    [suspected] = run.times(events.EngineSuspected)
    assert run.broken == []
    assert run.outcome == ("failed" if max_attempts == 1 else "completed")
    assert patience * 4000 < suspected < patience * 4000 + 30


@pytest.mark.parametrize("how", ["failed", "unknown"])
@pytest.mark.parametrize("on_preempt", OnPreempt)
def test_i27_an_operation_may_fail_at_any_step_and_the_books_still_add_up(how: str, on_preempt: OnPreempt):
    """`CoreWorld` checks conservation after every event; at the end everybody alive must be served."""
    for steps in all_steps(on_preempt=on_preempt):
        core = in_the_middle(steps, on_preempt)
        broken = next((a for a in core.pending.values() if not isinstance(a, actions.GrantLease)), None)
        if broken is None:
            continue
        core.end(broken, how)
        for _ in range(12):
            core.settle()
            for name in "ab":
                for _ in range(len(core.leases.get(name, {})) if core.state.ledger.books[name].alive else 0):
                    core.release(name)
            core.sleep(30)
        for name in "ab":
            book = core.state.ledger.books[name]
            assert not book.alive or core.serving(name), (steps, name, broken)
        assert not [gpu for gpu in core.state.ledger.gpus if gpu.hold in (Hold.CLEARING, Hold.QUARANTINED)]


# --- memory --------------------------------------------------------------------------------------------------


def free_when_taken(run: Run) -> list[int]:
    """Bytes in use on each GPU at the moment somebody was given it."""
    used: dict[int, int] = {}
    found = []
    for _, item in run.log:
        if isinstance(item, events.MemoryUsed):
            used[item.gpu] = item.used
        elif isinstance(item, actions.WakeEngine | actions.GrantLease):
            found += [used.get(gpu, 0) for gpu in item.gpus]
    return found


def test_i28_the_next_tenant_waits_for_the_memory_and_not_for_the_call():
    run = incident("i28")
    assert max(free_when_taken(run)) <= gib(6)  # residues, and nothing else
    given = [(at, item.gpus) for at, item in run.log if isinstance(item, actions.WakeEngine | actions.GrantLease)]
    engines = {job.spec.id: job.spec.infer for job in run.scenario.jobs}
    for asleep, order in run.all(actions.SleepEngine):
        (gpu,) = engines[order.pipeline].bundle(order.dp_rank)
        after = [at for at, gpus in given if gpu in gpus and at > asleep]
        assert not after or after[0] >= asleep + 6  # 1 s to sleep, 5 s until it is true


@pytest.mark.parametrize("lag", [0, 0.3, 2, 4.9, 14])
def test_i28_any_lag_below_the_release_limit_only_delays(lag: float):
    lags = Durations(parts=((1.0, "constant", ns(lag), 0),))
    run = Run(with_faults("i28"), release_lag=lags)
    assert run.fine() and max(free_when_taken(run)) <= gib(6)


def test_i29_sleeping_processes_are_counted_and_what_cannot_fit_is_refused_with_the_numbers():
    def many(count: int, engine: float) -> Any:
        needs = {"residue_gib": 0.5, "train_gib": 40, "engine_gib": engine, "init_peak_gib": 80}
        return world(2, *(pipeline(f"p{i}", [0], [0, 1], memory=needs) for i in range(count)))

    check_world(many(5, 135))
    with pytest.raises(TopologyError) as refused:
        check_world(many(10, 135))
    for number in ("GPU 0", "0.5", "135", "141 GiB"):
        assert number in str(refused.value)


def test_i29_admission_counts_those_who_are_there_already():
    core = CoreWorld(1)
    memory = msgspec.structs.replace(MEMORY, residue=4, engine=80)
    core.ready(*(spec(name, (0,), (0,), memory=memory) for name in "abc"))
    refused = core.join(spec("d", (0,), (0,), memory=memory))
    assert isinstance(refused, TopologyError) and "residues" in str(refused)
    core.say(events.PipelineLeft, "a")
    core.settle()
    assert core.say(events.PipelineAdmitted, "d") is None


def test_i30_an_engine_serves_only_when_all_of_it_is_awake_and_synced_and_doubled_calls_do_nothing():
    async def test(sim: SimWorld) -> None:
        await sim.initialise()
        assert "is not awake" in await sim.open(0)
        assert await sim.wake(0) is None
        assert "holds version -1" in await sim.open(0)  # awake, and with no weights
        before = sim.now
        assert await sim.wake(0) is None and sim.now == before
        assert await sim.sync(0) is None
        assert (await sim.generate(rank=0)).status == "aborted"  # its gate is shut
        assert await sim.open(0) is None and await sim.open(0) is None
        assert (await sim.generate(rank=0)).status == "completed"
        assert await sim.sleep(0) is None
        before = sim.now
        assert await sim.sleep(0) is None and sim.now == before
        assert "asleep" in await sim.sync(0)

    in_sim(make_scenario(), test)


@pytest.mark.parametrize("order", ["weights only", "kv only"])
def test_i30_half_an_engine_is_never_routable(order: str):
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,)))
    core.open("a", 20)
    core.settle(actions.AwaitMemory, actions.WakeEngine)
    (sync,) = core.pending.values()
    assert isinstance(sync, actions.SyncEngine) and not core.serving("a")
    core.end(sync, "failed" if order == "kv only" else "done")
    assert not core.serving("a")
    core.settle()
    assert core.serving("a") == [0]


def test_i31_memory_that_stays_is_quarantined_reaped_and_never_granted_meanwhile():
    run = incident("i31")
    (locked,) = run.times(actions.Note, kind="quarantine")
    reaped = [(at, action.dp_rank) for at, action in run.all(actions.KillEngine, pipeline="a")]
    assert len(reaped) == 1 and reaped[0][1] == 0 and reaped[0][0] >= locked
    given = [at for kind in (actions.WakeEngine, actions.GrantLease) for at, item in run.all(kind) if 0 in item.gpus]
    claimed = next(at for at, item in run.all(actions.SleepEngine, pipeline="a", dp_rank=0))
    assert not [at for at in given if claimed <= at < reaped[0][0]]
    assert max(free_when_taken(run)) <= gib(6)


@pytest.mark.parametrize("after", [30, 60, 90])
def test_i31_whoever_kept_memory_that_others_could_do_without_goes_when_somebody_needs_it(after: float):
    """A's trainer keeps 39 GiB from its initialisation on. Its engines fit beside that; B's initialisation does not."""
    small = {"train_gib": 40, "engine_gib": 60, "init_peak_gib": 130}
    a = pipeline("a", [0], [0], memory=small | {"init_peak_gib": 100}, steps=20)
    b = pipeline("b", [0], [0], memory=small, start_at=after)
    run = Run(world(1, a, b, faults=[{"at": 0, "kind": "false_release", "pipeline": "a"}]))
    assert run.broken == [] and "kept more than declared" in run.pipelines["a"]["error"]
    assert run.pipelines["b"]["error"] is None and run.wait("b") < 120


def test_i32_initialisations_do_not_overlap_and_their_peaks_fit():
    run = incident("i32")
    begun, ended = run.times(events.PhaseStarted, phase="init"), run.times(events.PhaseEnded, phase="init")
    assert len(begun) == 2 and begun[1] > ended[0]
    assert max(item.used for _, item in run.all(events.MemoryUsed) if item.gpu >= 0) <= gib(141)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [3, 4])
def test_i32_however_many_ask_one_initialises_at_a_time(count: int, shared: bool):
    peak = {"init_peak_gib": 130}
    jobs = [pipeline(f"p{i}", [0 if shared else i], [0 if shared else i], memory=peak) for i in range(count)]
    run = Run(world(1 if shared else count, *jobs))
    begun, ended = run.times(events.PhaseStarted, phase="init"), run.times(events.PhaseEnded, phase="init")
    assert run.fine() and all(b >= e for b, e in zip(begun[1:], ended, strict=False))


def test_i33_residue_that_grows_is_named_each_time_and_long_before_it_runs_out():
    run = incident("i33")
    named = [note for _, note in run.all(actions.Note, kind="residue_growth")]
    assert len(named) >= 3 and {note.pipeline for note in named} == {"a"} and {note.gpus for note in named} == {(0,)}
    assert "more than declared" in named[0].text


def test_i33_residue_that_runs_out_fails_whoever_kept_it_and_nobody_else():
    leak = fault("leak_residue", 40, pipeline="a", dp_rank=0, bytes=gib(30), count=50)
    run = Run(with_faults("i33", leak))
    assert run.broken == [] and run.pipelines["b"]["trajectories"] == 48, run.result.diagnosis


# --- weights -------------------------------------------------------------------------------------------------


def versions_served(run: Run, name: str) -> list[tuple[float, int, int]]:
    """(when, rank, version) of every gate that opened, each checked to be the version synced last."""
    synced: dict[int, int] = {}
    found = []
    for at, item in run.log:
        if getattr(item, "pipeline", "") != name:
            continue
        if isinstance(item, actions.WakeEngine):
            synced.pop(item.dp_rank, None)
        elif isinstance(item, actions.SyncEngine):
            synced[item.dp_rank] = item.version
        elif isinstance(item, actions.OpenGate):
            assert synced[item.dp_rank] == item.version
            found.append((at, item.dp_rank, item.version))
    return found


def test_i34_a_replaced_engine_serves_nothing_before_its_sync():
    run = incident("i34")
    gates = versions_served(run, "a")
    cold = list(run.all(actions.WakeEngine, cold=True))
    assert [action.dp_rank for _, action in cold] == [2, 1]
    for at, action in cold:
        opened = min(when for when, rank, _ in gates if rank == action.dp_rank and when > at)
        synced = run.times(actions.SyncEngine, dp_rank=action.dp_rank)
        assert [when for when in synced if at < when < opened]
        served = [
            item for when, item in run.all(events.TrajectoryCompleted, dp_rank=action.dp_rank) if at < when < opened
        ]
        assert not served


@pytest.mark.parametrize("at", range(44, 76, 3))
def test_i34_at_whatever_phase_an_engine_is_replaced(at: int):
    """Before, in and after training, publishing and syncing of the first two steps."""
    run = Run(with_faults("i34", fault("kill_engine", at + 0.5, pipeline="a", dp_rank=at % 4)))
    assert run.fine() and run.pipelines["a"]["trajectories"] == 160
    versions_served(run, "a")


def test_i35_an_expand_during_a_publish_serves_one_version_then_the_next_and_never_a_mix():
    run = incident("i35")
    gates = versions_served(run, "a")
    for rank in (0, 1):
        served = [version for _, r, version in gates if r == rank]
        assert served == sorted(served)
    published = {item.version: at for at, item in run.all(events.WeightsPublished, pipeline="a")}
    for _, sync in run.all(actions.SyncEngine, pipeline="a"):
        assert sync.version in published
    segments = [item.segments for _, item in run.all(events.TrajectoryCompleted, pipeline="a")]
    assert len(segments) == 96 and all(len(parts) == 1 for parts in segments)


def test_i36_the_capacity_of_a_dead_engine_comes_back_by_itself():
    run = incident("i36")
    died = run.times(events.EngineDied)[0]
    back = min(at for at, rank, _ in versions_served(run, "a") if rank == 3 and at > died)
    assert died == 100 and back < 135
    late = {item.dp_rank for at, item in run.all(events.TrajectoryCompleted) if 145 < at < 160}
    assert late == {0, 1, 2, 3}


@pytest.mark.parametrize("dead", [(0,), (0, 1), (0, 1, 2, 3)])
def test_i36_however_many_die_at_once(dead: tuple[int, ...]):
    run = Run(with_faults("i36", *(fault("kill_engine", 100, pipeline="a", dp_rank=rank) for rank in dead)))
    assert run.fine() and run.wait("a") < 40


def test_i37_a_sample_keeps_its_versions_and_the_oldest_counts():
    run = incident("i37")
    mixed = {}
    for _, item in run.all(events.TrajectoryCompleted):
        mixed[item.batch, item.trajectory] = [version for version, _ in item.segments]
    assert sum(len(versions) > 1 for versions in mixed.values()) > 10
    for _, taken in run.all(events.BatchTaken):
        for trajectory, behind in zip(taken.trajectories, taken.staleness, strict=True):
            assert behind == taken.version - mixed[taken.batch, trajectory][0] <= 1


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("in_flight", [False, True])
def test_i37_whatever_the_bound_no_sample_is_staler(staleness: int, in_flight: bool):
    long = {"trajectory": {"uniform": [5, 90]}, "engine_slots": 6}
    job = pipeline(
        "a", [2], [0, 1], staleness=staleness, in_flight_updates=in_flight, steps=5, batch={"prompts": 12}, costs=long
    )
    run = Run(world(3, job))
    assert run.fine() and max(max(item.staleness) for _, item in run.all(events.BatchTaken)) <= staleness


def test_i38_an_engine_that_wakes_has_the_latest_weights_and_not_those_it_slept_with():
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,), staleness=1))
    core.open("a", 20)
    core.settle()
    for version in (1, 2):
        core.ask("a")
        core.settle()
        core.say(events.WeightsPublished, "a", version=version)
        core.release("a")
        core.settle(actions.AwaitMemory, actions.WakeEngine)
        (sync,) = (a for a in core.pending.values() if isinstance(a, actions.SyncEngine))
        assert sync.version == version
        core.settle()


