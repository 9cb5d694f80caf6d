"""Pipelines side by side: when each starts and what one's failure means for the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from backends.sim.loop import run_sim
from core import events
from core.config import DriverPolicy, Job, Scenario, Trigger
from core.driver import Driver
from core.errors import OperationFailed, PipelineFailed
from core.model import Cluster
from core.units import NS_PER_S
from tests.fakes import FakeBackend, FakeService, broken, make_job


class Show:
    """A scenario on fakes."""

    def __init__(self, *jobs: Job, driver: DriverPolicy = DriverPolicy.ISOLATE) -> None:
        cluster = Cluster(nodes=1, gpus_per_node=2, gpu_memory=1, host_memory=1)
        self.scenario = Scenario(name="show", cluster=cluster, jobs=jobs, driver=driver)
        self.backend = FakeBackend()
        self.service = FakeService(self.backend)
        self.driver = Driver(self.scenario, self.service, self.backend)

    async def run(self) -> dict[str, Exception | None]:
        return await self.driver.run()

    def breaks(self, name: str, phase: str, error: Exception) -> None:
        self.backend.broken_phases[name, phase] = error

    def ended(self, name: str) -> list[str | None]:
        return [event.error for event in self.service.ports[name].seen(events.PipelineEnded)]

    def last_words(self, name: str) -> list[tuple[Any, ...]]:
        return self.service.ports[name].said[-2:]


def play(script: Callable[[Show], Awaitable[None]], *jobs: Job, **options: Any) -> Show:
    made: list[Show] = []

    async def main() -> None:
        made.append(Show(*jobs, **options))
        await script(made[0])

    run_sim(main)
    return made[0]


TWO = (make_job("p1"), make_job("p2"))


def test_all_pipelines_run_to_their_end():
    async def script(show: Show) -> None:
        assert await show.run() == {"p1": None, "p2": None}

    show = play(script, *TWO)
    assert (show.ended("p1"), show.ended("p2")) == ([None], [None])


def test_isolated_failures_belong_to_their_pipeline_and_the_others_go_on():
    async def script(show: Show) -> None:
        show.breaks("p1", "train", broken())
        outcomes = await show.run()
        assert isinstance(outcomes["p1"], OperationFailed)
        assert outcomes["p2"] is None

    show = play(script, *TWO)
    assert (show.ended("p1"), show.ended("p2")) == (["it broke"], [None])


def test_an_isolated_bug_is_reported_with_type_and_message():
    async def script(show: Show) -> None:
        show.breaks("p1", "train", ZeroDivisionError("division by zero"))
        assert isinstance((await show.run())["p1"], ZeroDivisionError)

    assert play(script, *TWO).ended("p1") == ["ZeroDivisionError: division by zero"]


def test_fail_fast_settles_the_peers_and_raises_the_first_error_bare():
    async def script(show: Show) -> None:
        show.breaks("p1", "train", broken())
        with pytest.raises(OperationFailed, match="it broke"):
            await show.run()
        assert [show.last_words(name)[-1] for name in ("p1", "p2")] == [("left",), ("left",)]
        assert not show.backend.running

    show = play(script, *TWO, driver=DriverPolicy.FAIL_FAST)
    assert show.last_words("p2")[0] == ("leave", "cancelled")
    assert show.ended("p2") == ["pipeline p2 failed: cancelled because another pipeline failed first: it broke"]


@pytest.mark.parametrize("settles_last", ["p1", "p2"])
def test_a_peer_that_fails_while_it_is_cancelled_does_not_replace_the_first_error(settles_last):
    async def script(show: Show) -> None:
        asyncio.get_running_loop().call_at_ns(
            1, lambda: setattr(show.service.ports[settles_last], "leaving_takes", 30 * NS_PER_S)
        )
        show.breaks("p1", "train", broken("first"))
        phase = show.backend.phase

        async def touchy(pipeline: str, *args: Any) -> None:
            try:
                await phase(pipeline, *args)
            except anyio.get_cancelled_exc_class():
                raise OperationFailed("cancelled the hard way") from None

        show.backend.phase = touchy
        with pytest.raises(OperationFailed, match="first"):
            await show.run()

    play(script, make_job("p1"), make_job("p2", start_at=NS_PER_S // 2), driver=DriverPolicy.FAIL_FAST)


def test_cancellation_from_outside_cleans_up_everybody_and_goes_on_outwards():
    async def script(show: Show) -> None:
        with anyio.move_on_after(4) as outer:
            await show.run()
        assert outer.cancelled_caught

    show = play(script, *TWO)
    for name in ("p1", "p2"):
        assert show.last_words(name) == [("leave", "cancelled"), ("left",)]
        assert show.ended(name) == ["cancelled"]


def test_a_pipeline_starts_at_its_time_exactly():
    async def script(show: Show) -> None:
        at = 12_345_678_901
        asyncio.get_running_loop().call_at_ns(at - 1, lambda: early.extend(show.service.ports["p2"].said))
        asyncio.get_running_loop().call_at_ns(at + 1, lambda: late.extend(show.service.ports["p2"].said))
        await show.run()

    early: list[Any] = []
    late: list[Any] = []
    play(script, make_job("p1"), make_job("p2", start_at=12_345_678_901))
    assert early == []
    assert late[0] == ("register",)


def test_triggers_hold_back_a_start_and_a_dispatch_until_they_happened():
    granted = Trigger(pipeline="p1", event="rollout_granted")
    accepted = Trigger(pipeline="p2", event="init_accepted")
    jobs = (make_job("p1", dispatch_after=accepted), make_job("p2", start_after=granted))

    async def script(show: Show) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(show.run)
            await anyio.sleep(50)
            assert show.service.ports["p2"].said == []
            show.service.triggers[granted].set()
            await anyio.sleep(5)
            assert {a.pipeline for a in show.backend.attempts} == {"p2"}
            show.service.triggers[accepted].set()

    show = play(script, *jobs)
    assert (show.ended("p1"), show.ended("p2")) == ([None], [None])


def test_a_trigger_of_a_pipeline_that_is_over_no_longer_holds_anyone_back():
    granted = Trigger(pipeline="p1", event="rollout_granted")

    async def script(show: Show) -> None:
        show.breaks("p1", "init", broken())
        outcomes = await show.run()
        assert outcomes["p2"] is None

    play(script, make_job("p1"), make_job("p2", start_after=granted))


def test_a_pipeline_failed_by_the_scheduler_is_its_own_error_only():
    async def script(show: Show) -> None:
        asyncio.get_running_loop().call_at_ns(
            2 * NS_PER_S, lambda: show.service.ports["p1"].gates.failed("its only GPU is lost")
        )
        outcomes = await show.run()
        assert isinstance(outcomes["p1"], PipelineFailed)
        assert outcomes["p2"] is None

    play(script, *TWO)


def test_a_client_that_vanishes_says_nothing_more_and_its_work_stops():
    async def script(show: Show) -> None:
        asyncio.get_running_loop().call_at_ns(4 * NS_PER_S, lambda: show.driver.vanish("p1"))
        outcomes = await show.run()
        assert str(outcomes["p1"]) == "pipeline p1 failed: its client vanished"
        assert outcomes["p2"] is None

    show = play(script, *TWO)
    assert "leave" not in show.service.ports["p1"].words()
    assert show.service.ports["p1"].words()[-1] == "closed"


def test_a_client_that_vanishes_before_it_started_never_starts():
    async def script(show: Show) -> None:
        asyncio.get_running_loop().call_at_ns(4 * NS_PER_S, lambda: show.driver.vanish("p2"))
        assert str((await show.run())["p2"]) == "pipeline p2 failed: its client vanished"

    assert play(script, make_job("p1"), make_job("p2", start_at=8 * NS_PER_S)).service.ports["p2"].said == []
