"""One pipeline's loop: the order of what it says, what it holds when, and how it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from backends.sim.loop import run_sim
from core import events, pipeline
from core.config import Evaluation
from core.errors import Conflict, OperationFailed, PipelineFailed, TopologyError
from core.model import Role, WorkerGroup
from core.pipeline import Hooks, Pipeline, describe, first_error
from core.units import NS_PER_S
from tests.fakes import FakeBackend, FakePort, broken, make_job

ALL_GROUPS = (
    WorkerGroup(role=Role.ACTOR_TRAIN, gpus=(0,)),
    WorkerGroup(role=Role.ACTOR_INFER, gpus=(0, 1)),
    WorkerGroup(role=Role.CRITIC, gpus=(1,)),
    WorkerGroup(role=Role.REFERENCE, gpus=(1,)),
)


class Stage:
    """A pipeline with everything around it."""

    def __init__(self, loop: Callable[[Hooks], Any] | None = None, backend: Any = None, **job: Any) -> None:
        self.backend = backend or FakeBackend()
        self.port = FakePort("p1", self.backend)
        self.failures: list[Exception] = []
        self.released = anyio.Event()
        self.pipeline = Pipeline(
            make_job(**job),
            self.port,
            self.backend,
            loop=loop,
            on_failure=self.failures.append,
            may_dispatch=job.pop("may_dispatch", None),
        )

    async def run(self) -> None:
        await self.pipeline.run()


def play(script: Callable[[Stage], Awaitable[None]] = Stage.run, **options: Any) -> Stage:
    made: list[Stage] = []

    async def main() -> None:
        made.append(Stage(**options))
        await script(made[0])

    run_sim(main)
    return made[0]


def spoken(stage: Stage, *without: str) -> list[tuple[Any, ...]]:
    return [said for said in stage.port.said if said[0] not in without]


# --- the order of a step --------------------------------------------------------------------------------


def test_a_run_says_these_things_in_this_order():
    said = spoken(play(target=1), "trajectory_completed")
    assert said == [
        ("register",),
        ("admit",),
        ("request", "INITIALIZATION"),
        ("weights_published", 0),
        ("batch_opened", 0, 1, "train"),
        ("rollout_signal", 0),
        ("release",),
        ("batch_closed", 0, "taken"),
        ("request", "ACTOR_TRAINING"),
        ("weights_published", 1),
        ("batch_opened", 1, 1, "train"),  # the demand is known before the GPUs are given away
        ("rollout_signal", 1),
        ("release",),
        ("batch_closed", 1, "taken"),
        ("request", "ACTOR_TRAINING"),
        ("weights_published", 2),
        ("release",),
        ("leave", None),
        ("left",),
    ]


def test_phases_follow_the_lease_and_the_trainer_is_offloaded_before_every_release():
    phases = [(phase, version) for _, _, phase, version in play(steps=1).backend.phases]
    assert phases == [
        ("init", -1), ("publish", 0), ("offload", -1),
        ("onload", -1), ("train", -1), ("publish", 1), ("offload", -1),
    ]  # fmt: skip


def test_a_group_is_offloaded_even_between_two_leases_of_its_own():
    phases = [phase for _, _, phase, _ in play(steps=1, old_log_probs=True).backend.phases][3:]
    assert phases == ["onload", "log_probs", "offload", "onload", "train", "publish", "offload"]


def test_with_every_group_the_stages_come_in_the_fields_usual_order_and_one_group_swaps_its_lease_atomically():
    stage = play(steps=1, old_log_probs=True, groups=ALL_GROUPS)
    asked = [said[-1] for said in spoken(stage) if said[0] == "request"][1:]
    assert asked == ["OLD_LOG_PROBS", "REF_LOG_PROBS", "VALUE_COMPUTE", "CRITIC_TRAINING", "ACTOR_TRAINING"]
    swaps = [i for i, said in enumerate(stage.port.said) if said[0] == "release_and"]
    assert [stage.port.said[i + 1] for i in swaps] == [("request", "CRITIC_TRAINING")]
    work = [(role, phase) for _, role, phase, _ in stage.backend.phases if phase not in ("onload", "offload")]
    assert work[2:] == [
        ("actor_train", "log_probs"), ("reference", "log_probs"), ("critic", "values"), ("critic", "train"),
        ("actor_train", "train"), ("actor_train", "publish"),
    ]  # fmt: skip


def test_every_phase_is_in_the_log_with_its_gpus_and_its_end():
    port = play(steps=1).port
    started, ended = port.seen(events.PhaseStarted), port.seen(events.PhaseEnded)
    assert [e.phase for e in started] == [e.phase for e in ended]
    assert {e.gpus for e in started} == {(0,)}
    assert {e.error for e in ended} == {None}


def test_progress_counts_each_accepted_trajectory_once():
    delivered = [said[1:3] for said in play().port.said if said[0] == "trajectory_completed"]
    assert delivered == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_taken_samples_and_finished_steps_are_in_the_log():
    port = play().port
    taken = port.seen(events.BatchTaken)
    assert [(t.batch, t.version, sorted(t.trajectories), t.staleness) for t in taken] == [
        (0, 0, [0, 1, 2, 3], (0,) * 4),
        (1, 1, [0, 1, 2, 3], (0,) * 4),
    ]
    assert [e.step for e in port.seen(events.StepCompleted)] == [0, 1]


# --- staleness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_at_most_staleness_plus_one_training_batches_are_open(staleness):
    open_now, most, opened = 0, 0, 0
    for said in play(steps=6, staleness=staleness).port.said:
        open_now += (said[0] == "batch_opened") - (said[0] == "batch_closed")
        opened += said[0] == "batch_opened"
        most = max(most, open_now)
    assert (most, opened, open_now) == (staleness + 1, 6, 0)


def test_with_staleness_the_next_batch_rolls_out_while_the_trainer_trains():
    async def script(stage: Stage) -> None:
        stage.backend.phase_takes = 20 * NS_PER_S
        await stage.run()

    port = play(script, steps=3, staleness=1).port
    closed = port.said.index(("batch_closed", 0, "taken"))
    published = port.said.index(("weights_published", 1))
    during = [said for said in port.said[closed:published] if said[0] == "trajectory_completed"]
    assert [said[1] for said in during] == [1] * 4 or port.said.index(("batch_closed", 0, "taken")) < published
    assert max(max(t.staleness) for t in port.seen(events.BatchTaken)) == 1


# --- evaluation, rewards, triggers ----------------------------------------------------------------------


def test_evaluation_runs_every_n_steps_on_one_version_and_is_closed_before_the_next_weights():
    stage = play(steps=4, evaluation=Evaluation(every=2, trajectories=3))
    said = spoken(stage)
    for batch, version in ((2, 2), (5, 4)):
        closed = said.index(("batch_closed", batch, "evaluated"))
        assert said.index(("batch_opened", batch, 3, "eval")) < closed
        versions = {s[6][0][0] for s in said if s[0] == "trajectory_completed" and s[1] == batch}
        assert versions == {version}
        if version < 4:
            assert closed < said.index(("weights_published", version + 1))


def test_a_declared_reward_delays_acceptance():
    async def script(stage: Stage) -> None:
        await stage.run()

    plain, rewarded = (play(script, steps=1, reward_s=reward) for reward in (0, 7 * NS_PER_S))
    first = [[said[0] for said in stage.port.said].index("trajectory_completed") for stage in (plain, rewarded)]
    assert first[0] == first[1]
    assert len(rewarded.port.seen(events.BatchTaken)[0].trajectories) == 4


def test_nothing_is_dispatched_before_it_may_be():
    async def main() -> None:
        backend = FakeBackend()
        port = FakePort("p1", backend)
        told = anyio.Event()
        run = Pipeline(make_job(), port, backend, may_dispatch=told.wait)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.run)
            await asyncio.get_running_loop().sleep_ns(100 * NS_PER_S)
            assert ("rollout_signal", 0) in port.said
            assert not backend.attempts
            told.set()
        assert port.said[-1] == ("left",)

    run_sim(main)


# --- failure --------------------------------------------------------------------------------------------


def test_a_failed_phase_ends_the_pipeline_with_its_own_error_and_returns_what_it_held():
    async def script(stage: Stage) -> None:
        stage.backend.broken_phases["p1", "train"] = broken()
        with pytest.raises(OperationFailed, match="it broke"):
            await stage.run()
        assert stage.port.held == []
        assert [str(e) for e in stage.failures] == ["it broke"]

    stage = play(script)
    assert stage.port.said[-2:] == [("leave", "it broke"), ("left",)]
    assert [e.error for e in stage.port.seen(events.PhaseEnded)][-1] == "it broke"


def test_a_refused_registration_is_raised_and_leaves_nothing_to_clean_up():
    async def script(stage: Stage) -> None:
        stage.port.refused["register"] = TopologyError("p1", "no such GPU")
        with pytest.raises(TopologyError):
            await stage.run()

    assert play(script).port.words() == ["register"]


def test_a_refused_admission_is_raised_and_the_pipeline_leaves():
    async def script(stage: Stage) -> None:
        stage.port.refused["admit"] = TopologyError("p1", "does not fit")
        with pytest.raises(TopologyError):
            await stage.run()

    assert play(script).port.words() == ["register", "admit", "leave", "left"]


@pytest.mark.parametrize("hangs_in", ["init", "train", "offload"])
def test_the_scheduler_can_fail_a_pipeline_wherever_it_hangs(hangs_in):
    async def script(stage: Stage) -> None:
        stage.backend.hanging_phases.append(("p1", hangs_in))
        asyncio.get_running_loop().call_at_ns(
            100 * NS_PER_S, lambda: stage.pipeline.failed("held its GPUs for too long")
        )
        with pytest.raises(PipelineFailed, match="pipeline p1 failed: held its GPUs for too long"):
            await stage.run()
        assert not stage.backend.running

    assert play(script).port.said[-2] == ("leave", "pipeline p1 failed: held its GPUs for too long")


def test_a_batch_of_which_nothing_comes_back_fails_the_pipeline():
    async def script(stage: Stage) -> None:
        stage.backend.takes = None
        with pytest.raises(PipelineFailed, match="no trajectory of batch 0 came back: given up after 2 attempts"):
            await stage.run()
        assert not stage.backend.running

    stage = play(script, reissue_after=30 * NS_PER_S, max_attempts=2)
    assert len(stage.port.seen(events.TrajectoryDropped)) == 4


def test_cancellation_cleans_up_within_its_limit_and_goes_on_outwards():
    async def script(stage: Stage) -> None:
        with anyio.move_on_after(2.5) as outer:
            await stage.run()
        assert outer.cancelled_caught
        assert anyio.current_time() == 3.5
        assert not stage.failures

    assert play(script).port.said[-2:] == [("leave", "cancelled"), ("left",)]


def test_cleanup_is_bounded_and_never_hides_the_first_error():
    async def script(stage: Stage) -> None:
        stage.port.leaving_takes = 1000 * NS_PER_S
        stage.backend.broken_phases["p1", "init"] = broken()
        with pytest.raises(OperationFailed, match="it broke"):
            await stage.run()
        assert anyio.current_time() == 1 + pipeline.CLEANUP_S

    play(script)


def test_a_pipeline_whose_workers_do_not_stop_has_not_ended_well():
    async def script(stage: Stage) -> None:
        stage.port.leaving_takes = 1000 * NS_PER_S
        with pytest.raises(PipelineFailed, match="not stopped within 60 s"):
            await stage.run()

    play(script)


def test_a_bug_keeps_its_type_and_message():
    async def script(stage: Stage) -> None:
        stage.backend.broken_phases["p1", "train"] = ZeroDivisionError("division by zero")
        with pytest.raises(ZeroDivisionError):
            await stage.run()

    assert play(script).port.said[-2] == ("leave", "ZeroDivisionError: division by zero")


def test_of_a_nested_group_the_first_error_counts():
    first, second = broken("first"), broken("second")
    assert first_error(ExceptionGroup("", [ExceptionGroup("", [first]), second])) is first
    assert describe(None) is None


# --- someone else's loop --------------------------------------------------------------------------------


class ForeignLoop:
    """A training loop that knows nothing but the four hooks."""

    def __init__(self, hooks: Hooks, backend: FakeBackend) -> None:
        self.hooks = hooks
        self.backend = backend
        self.data: list[list[int]] = []

    def begin(self) -> None:
        self.hooks.open_batch(0, 3)

    async def run(self) -> None:
        self.data.append([sample.trajectory for sample in await self.hooks.before_step(0)])
        await self.hooks.after_step(0, 1)
        self.hooks.open_batch(7, 2)
        self.data.append([sample.trajectory for sample in await self.hooks.before_step(1)])
        await self.hooks.release_only()
        self.hooks.open_batch(9, 1)
        self.data.append([sample.trajectory for sample in await self.hooks.before_step(2)])
        await self.hooks.after_step(2, 2)


def run_foreign(loop: Callable[[Hooks], Any]) -> FakePort:
    return play(loop=loop).port


def test_a_foreign_loop_gets_its_data_and_leases_from_the_four_hooks_alone():
    loops: list[ForeignLoop] = []

    def make(hooks: Hooks) -> ForeignLoop:
        loops.append(ForeignLoop(hooks, FakeBackend()))
        return loops[0]

    port = run_foreign(make)
    assert [sorted(data) for data in loops[0].data] == [[0, 1, 2], [0, 1], [0]]
    assert [(t.batch, t.version) for t in port.seen(events.BatchTaken)] == [(0, 0), (7, 1), (9, 1)]
    assert [e.step for e in port.seen(events.StepCompleted)] == [0, 2]
    assert port.held == []


def test_a_step_without_a_batch_is_the_callers_mistake():
    class Hasty(ForeignLoop):
        def begin(self) -> None:
            pass

    with pytest.raises(Conflict, match="step 0 has no batch"):
        run_foreign(lambda hooks: Hasty(hooks, FakeBackend()))


def test_release_only_without_a_lease_does_nothing():
    class Idle(ForeignLoop):
        async def run(self) -> None:
            await self.hooks.release_only()

    port = run_foreign(lambda hooks: Idle(hooks, FakeBackend()))
    assert port.words().count("release") == 1
