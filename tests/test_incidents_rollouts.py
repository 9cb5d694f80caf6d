"""Incidents I39 to I55: rollouts, and operating it. What only real hardware can show is listed in docs/incidents.md."""

import signal
from typing import Any

import anyio
import msgspec
import pytest
from core_world import CoreWorld, spec
from incident_world import Run, incident, pipeline, world
from test_incidents_faults import all_steps, fault, in_the_middle, with_faults

from backends.sim.backend import SimBackend
from backends.sim.loop import run_sim
from core import actions, events
from core.accounting import Accounting
from core.errors import Conflict, TopologyError
from core.model import BatchKind, Partial, Priority, Role
from core.run import execute
from core.service import Service
from core.topology import check_world, remarks
from core.trace import TraceWriter, feed, header_of, read_log
from core.waits import explain, waits
from scenarios import catalogue


def changed(name: str, first: dict[str, Any], **spec_fields: Any) -> Any:
    """The scenario with its first pipeline changed."""
    scenario = catalogue.load(name)
    job = scenario.jobs[0]
    job = msgspec.structs.replace(job, **first, spec=msgspec.structs.replace(job.spec, **spec_fields))
    return msgspec.structs.replace(scenario, jobs=(job, *scenario.jobs[1:]), expect=None)


def taken(run: Run, name: str) -> list[tuple[int, ...]]:
    return [item.trajectories for _, item in run.all(events.BatchTaken, pipeline=name)]


# --- rollouts ------------------------------------------------------------------------------------------------


def test_i39_trajectories_that_never_return_are_reissued_given_up_and_cost_a_limit_each_step():
    run = incident("i39")
    given_up = [item for _, item in run.all(events.TrajectoryDropped, pipeline="a")]
    assert 1 <= len(given_up) <= 12
    assert sum(map(len, taken(run, "a"))) == 256 - len(given_up)
    shorter = [item for _, item in run.all(events.DemandChanged, pipeline="a")]
    assert [item.target for item in shorter] and min(item.target for item in shorter) >= 120
    assert run.pipelines["b"]["trajectories"] == 64 and run.wait("b") < 30  # a's engines were not held meanwhile


def test_i39_a_batch_of_which_nothing_returns_fails_its_pipeline_and_nobody_else():
    run = Run(world(
        2, pipeline("a", [0], [0, 1], reissue_after_s=30, max_attempts=2, costs={"trajectory": 100000}),
        pipeline("b", [1], [0, 1]),
    ))  # fmt: skip
    assert "no trajectory" in run.pipelines["a"]["error"] and run.broken == []
    assert run.pipelines["b"]["error"] is None and run.result.summary["makespan_s"] < 400


def test_i40_a_trajectory_preempted_twice_is_resumed_with_the_versions_of_its_parts():
    run = incident("i40")
    first = [item for _, item in run.all(events.TrajectoryCompleted, pipeline="a", batch=0)]
    assert max(item.attempt for item in first) >= 2  # preempted twice
    for item in first:
        assert sum(tokens for _, tokens in item.segments) == pytest.approx(90 / 0.02, rel=0.01)  # once, not thrice
        assert [version for version, _ in item.segments] == sorted(version for version, _ in item.segments)
    gates = run.times(actions.OpenGate, pipeline="a")
    done = [at for at, item in run.all(events.TrajectoryCompleted, pipeline="a", batch=0)]
    assert done[0] - gates[0] > 90 + 2 * 10  # and it took the two interruptions


def test_i40_with_partial_rollout_off_it_restarts_and_still_gets_through():
    run = Run(changed("i40", {}, partial=Partial.RESTART))
    assert run.fine(), (run.broken, run.result.diagnosis)
    for _, item in run.all(events.TrajectoryCompleted, pipeline="a"):
        assert len(item.segments) == 1


def test_i41_a_failed_trajectory_never_enters_a_batch():
    run = incident("i41")
    failed = [item for _, item in run.all(events.TrajectoryCompleted) if item.attempt > 0]
    assert len(failed) >= 3  # cut off by a death, and generated again
    assert taken(run, "a") and all(sorted(batch) == list(range(100)) for batch in taken(run, "a"))
    assert {item.target for _, item in run.all(events.BatchOpened)} == {100}
    for number in range(3):
        counted = [item.delivered for _, item in run.all(events.TrajectoryCompleted, batch=number)]
        assert counted == list(range(1, 101))
    assert all(item.segments for _, item in run.all(events.TrajectoryCompleted))


def test_i42_a_drain_that_does_not_end_becomes_an_abort_and_then_a_kill():
    run = incident("i42")
    asked = run.times(events.LeaseRequested, pipeline="b", priority=Priority.ACTOR_TRAINING)
    granted = [at for at, lease in run.all(actions.GrantLease, pipeline="b") if lease.request > 0]
    first, second = (got - wanted for wanted, got in zip(asked[:2], granted[:2], strict=True))
    assert 30 <= first < 33  # drained for 30 s, aborted
    assert 50 <= second < 52  # and 20 s for the sleep that did not come; then killed
    assert len(run.times(actions.KillEngine)) == 1 and run.pipelines["a"]["trajectories"] == 4


def test_i43_the_smallest_of_everything_makes_progress():
    assert all(figures["trajectories"] == 3 for figures in incident("i43").pipelines.values())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("gpus, tp", [(1, 1), (2, 2), (4, 4)])
def test_i43_one_engine_one_slot_one_trajectory_at_any_width(count: int, gpus: int, tp: int):
    mapped = list(range(gpus))
    jobs = [
        pipeline(f"p{i}", mapped, mapped, tp, batch={"prompts": 1}, costs={"engine_slots": 1}) for i in range(count)
    ]
    run = Run(world(gpus, *jobs))
    assert run.fine() and all(figures["trajectories"] == 2 for figures in run.pipelines.values())


def test_i44_late_lost_and_doubled_reports_count_once():
    run = incident("i44")
    doubled = sum(item.kind == "duplicate_message" for _, item in run.all(events.FaultInjected))
    assert doubled == 2 and len(list(run.all(events.StateResent))) >= 1
    for name in "ab":
        assert [sorted(batch) for batch in taken(run, name)] == [list(range(20))] * 3
        assert max(item.delivered for _, item in run.all(events.TrajectoryCompleted, pipeline=name)) <= 20


def test_i44_progress_never_passes_the_target():
    core = CoreWorld(1)
    core.ready(spec("a", (0,), (0,)))
    core.open("a", 2)
    core.settle()
    core.complete("a")
    fields = {"batch": 0, "trajectory": 0, "attempt": 1, "dp_rank": 0}
    for delivered in (0, 1, 3):
        assert isinstance(core.say(events.TrajectoryCompleted, "a", delivered=delivered, **fields), Conflict)
    assert core.state.ledger.books["a"].open_demand == 1


@pytest.mark.parametrize("kind", ["lose_message", "delay_message", "duplicate_message"])
@pytest.mark.parametrize("at", [0, 21, 44, 49, 58, 66, 80])
def test_i44_whatever_happens_to_messages_only_delays(kind: str, at: float):
    more = {"duration": 7_000_000_000} if kind == "delay_message" else {}
    run = Run(with_faults("i44", *(fault(kind, at, pipeline=name, count=6, **more) for name in "ab")))
    assert run.fine(), (run.outcome, run.broken, run.result.diagnosis)


def test_i45_evaluation_and_training_share_engines_and_each_evaluation_is_on_one_version():
    run = incident("i45")
    evaluations = [item.batch for _, item in run.all(events.BatchOpened, pipeline="a", kind=BatchKind.EVAL)]
    assert len(evaluations) == 4
    for batch in evaluations:
        reports = [item for _, item in run.all(events.TrajectoryCompleted, pipeline="a", batch=batch)]
        assert len({version for item in reports for version, _ in item.segments}) == 1
    for other in run.times(events.BatchClosed, pipeline="a", reason="evaluated"):
        opened = max(at for at, _ in run.all(events.BatchOpened, pipeline="a", kind=BatchKind.EVAL) if at < other)
        assert other - opened < 200
    assert run.pipelines["a"]["trajectories"] == 96


# --- operating it --------------------------------------------------------------------------------------------


def test_i47_what_a_killed_driver_held_is_reclaimed_and_the_next_starts_clean():
    run = incident("i47")
    lost = run.times(events.ClientLost)[0]
    at, grant = next(run.all(actions.GrantLease, pipeline="b"))
    assert lost == 91 and at - lost < 2
    before = run.log[: run.log.index((at, grant))]
    used = {item.gpu: item.used for _, item in before if isinstance(item, events.MemoryUsed)}
    assert used == {0: 0, 1: 0, -1: 0}


@pytest.mark.parametrize("duration", [0, 1, 20])
@pytest.mark.parametrize("at", [5, 23, 43, 47, 60])
def test_i47_the_control_plane_may_restart_at_any_moment(at: float, duration: float):
    outage = fault("restart_control_plane", at + 0.3, duration=int(duration * 1e9))
    run = Run(with_faults("i01", outage))
    assert run.fine(), (run.outcome, run.broken, run.result.diagnosis)


def test_i22_i47_a_restarted_client_learns_at_once_that_its_predecessor_is_not_over():
    """Its messages would pass for repetitions of the predecessor's: acknowledged, without effect, for ever."""
    scenario = catalogue.load("i01")
    one = scenario.jobs[0].spec

    async def main() -> None:
        backend = SimBackend(scenario)
        async with Service(backend, scenario.cluster, scenario.demand) as service:
            await backend.open(service.tell)
            first = service.connect("a")
            await first.register(one)
            await first.admit()
            lease = await first.request(Role.ACTOR_TRAIN, Priority.INITIALIZATION)
            first.batch_opened(0, 8)
            second = service.connect("a")
            for ask in (lambda: second.register(one), second.admit):
                with pytest.raises(Conflict, match="another client"):
                    await ask()
            with pytest.raises(Conflict, match="another client"):
                await second.leave(None)
            service.tell(events.ClientLost(pipeline="a", reason="no heartbeat"))
            third = service.connect("a")
            while True:
                try:
                    await third.register(one)
                    break
                except Conflict:  # it is being stopped
                    await anyio.sleep(0.2)
            await third.admit()
            assert (await third.request(Role.ACTOR_TRAIN, Priority.INITIALIZATION)).gpus == lease.gpus
            await backend.close()

    run_sim(main)


@pytest.mark.parametrize("entry", [0, 3, 20, 60, 90, 140, 200])
def test_i48_an_interruption_at_any_moment_leaves_nothing_behind(entry: int):
    scenario = catalogue.load("i01")
    backend = SimBackend(scenario)

    def press(i: int, t_ns: int, cause: int, item: Any) -> None:
        if i == entry:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        execute(scenario, backend, [press])
    assert stopped.value.args[0].outcome == "interrupted"
    memory = backend.world.memory
    assert sum(device.used for device in (*memory.gpus, *memory.hosts)) == 0


def test_i49_a_worker_refuses_other_gpus_than_it_runs_on():
    run = Run(catalogue.load("i01"))
    declared = {job.spec.id: job.spec.infer for job in run.scenario.jobs}
    woken = [item for _, item in run.all(actions.WakeEngine)]
    assert woken and all(item.gpus == declared[item.pipeline].bundle(item.dp_rank) for item in woken)


def test_i50_the_teardown_of_one_that_finishes_early_touches_nobody_else():
    run = incident("i50")
    left = run.times(events.PipelineEnded, pipeline="a")[0]
    reports = [item for at, item in run.all(events.TrajectoryCompleted, pipeline="b")]
    assert left < 100 and len(reports) == 500
    assert not [at for at in run.times(actions.SleepEngine, pipeline="b") if left - 3 < at < left + 30]
    assert not [at for at in run.times(actions.KillEngine)]
    assert {item.dp_rank for at, item in run.all(events.TrajectoryCompleted, pipeline="b") if at > left + 20} == {0, 1}


def test_i51_what_is_declared_and_never_used_or_shared_is_said_at_start():
    lonely = world(8, pipeline("a", [0], [0, 1]), pipeline("b", [1], [0, 1]), pipeline("c", [4], [4, 5]))
    said = remarks(lonely)
    assert any("4 of the 8 declared GPUs" in line or "[2, 3, 6, 7]" in line for line in said)
    assert any(line.startswith("c shares no GPU") for line in said)
    too_much = {"train_gib": 40, "engine_gib": 140, "residue_gib": 4}
    with pytest.raises(TopologyError) as refused:
        check_world(world(2, pipeline("a", [0], [0, 1], memory=too_much), pipeline("b", [1], [0, 1], memory=too_much)))
    assert "188 GiB" in str(refused.value) and "141 GiB" in str(refused.value)


def test_i52_at_every_moment_whoever_waits_is_listed_with_what_for_and_behind_whom():
    seen = 0
    for steps in all_steps():
        core = in_the_middle(steps)
        listed = [(wait.pipeline, wait.what) for wait in waits(core.state)]
        for book in core.state.ledger.books.values():
            if book.requests:
                assert any(name == book.id and "actor_train" in what for name, what in listed), steps
            if book.open_demand and not core.serving(book.id):
                assert (book.id, "a rollout engine") in listed, steps
            seen += len(book.requests)
        for wait in waits(core.state):
            assert wait.reasons and wait.what and 0 <= wait.since <= core.now
    assert seen > 10


def test_i52_the_explanation_names_holder_thing_and_time():
    core = CoreWorld(2)
    core.ready(spec("a", (0,), (0,)), spec("b", (0,), (1,)))
    core.ask("a")
    core.settle()
    core.sleep(40)
    core.ask("b")
    core.sleep(10)
    core.feed(events.TimerFired(timer="none", generation=0))
    text = explain(core.state)
    for said in ("b waits for GPUs [0]", "ACTOR_TRAINING", "held by a's actor_train", "since 40 s", "for 10 s"):
        assert said in text


@pytest.mark.parametrize("name", ["i05", "i28", "i41"])
def test_i53_the_figures_follow_from_the_log_alone_and_add_up(name: str, tmp_path: Any):
    scenario = catalogue.load(name)
    path = tmp_path / "log.jsonl"
    with TraceWriter(path, header_of(scenario, "sim")) as writer:
        result = execute(scenario, "sim", [writer])
    header, entries = read_log(path)
    again = Accounting(scenario)
    feed(entries, again)
    told = result.summary
    assert header.scenario == told["scenario"]
    assert again.figures() == {key: told[key] for key in ("makespan_s", "handovers", "gpus", "pipelines")}
    for gpu in told["gpus"]:
        assert gpu["busy_s"] + gpu["switching_s"] + gpu["idle_s"] == pytest.approx(told["makespan_s"], abs=1e-6)


def test_i53_switching_includes_every_sleep_wake_and_sync():
    run = incident("i36")
    begun: dict[int, tuple[float, Any]] = {}
    spent = 0.0
    for at, item in run.log:
        if isinstance(item, actions.WakeEngine | actions.SyncEngine | actions.SleepEngine):
            begun[item.action] = (at, item)
        elif isinstance(item, events.ActionDone) and item.action in begun:
            spent += at - begun.pop(item.action)[0]
    reported = sum(gpu["switching_s"] for gpu in run.result.summary["gpus"])
    initialised = 5 * 22
    assert spent > 50 and reported >= spent + initialised


@pytest.mark.parametrize("first", ["a", "b"])
def test_i54_after_both_released_every_engine_the_next_rollout_starts_by_itself(first: str):
    core = CoreWorld(4)
    core.ready(spec("a", (0, 1), (0, 1, 2, 3)), spec("b", (2, 3), (0, 1, 2, 3)))
    order = [first, "b" if first == "a" else "a"]
    for _ in range(3):
        for name in order:
            core.open(name, 8)
        core.settle()
        assert core.serving(order[0])
        for name in order:
            while core.state.ledger.books[name].open_demand:
                for _ in range(4):  # at most one residence of the other
                    if not core.serving(name):
                        core.sleep(10)
                        core.settle()
                core.complete(name)
        for name in order:
            core.close(name)
            core.say(events.RolloutReleased, name)
        core.settle()
        assert [core.holder(gpu) for gpu in range(4)] == ["free"] * 4


def test_i54_training_that_takes_every_engine_of_both_does_not_stop_the_next_rollout():
    assert all(figures["steps_done"] == 4 for figures in incident("i54").pipelines.values())


@pytest.mark.parametrize("flying", [actions.WakeEngine, actions.SyncEngine, actions.SleepEngine, actions.AwaitMemory])
def test_i55_reports_and_openings_are_handled_while_an_operation_of_another_runs(flying: type):
    core = CoreWorld(4)
    core.ready(spec("a", (0,), (0, 1, 2)), spec("b", (3,), (2, 3)))
    core.open("a", 50)
    if flying in (actions.SleepEngine, actions.AwaitMemory):
        core.settle()
        core.ask("a")
    while not any(isinstance(action, flying) for action in core.pending.values()):
        core.end(next(iter(core.pending.values())))
    held_up = next(action for action in core.pending.values() if isinstance(action, flying))
    core.open("b", 50)
    assert core.up("b")
    while others := [a for a in core.pending.values() if a is not held_up]:
        core.end(others[0])
    assert core.serving("b")
    core.complete("b")
    assert core.state.ledger.books["b"].open_demand == 49 and held_up.action in core.pending


def test_i55_nobody_waits_behind_a_sync_of_two_minutes():
    run = incident("i55")
    assert run.wait("b") < 25 and run.wait("a") > 100


