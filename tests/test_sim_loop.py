"""The loop on virtual time: clock, calendar, bridge to SimPy, ends of a run, the fence, and anyio as its tenant."""

import asyncio
import contextvars
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
import simpy

from backends.sim.calendar import COMPACT_ABOVE, Bell, SimEnv, ns_not_before
from backends.sim.fence import fenced, unfenced
from backends.sim.loop import SimLoop, SimTask, daemon_timers, run_sim
from backends.sim.policies import CANDIDATES_MAX, Chooser, Fifo, Holds, Walk, is_step
from core.errors import Deadlock, FencedCall, Livelock, SimulationError
from core.units import NS_PER_S

ROOT = Path(__file__).parent.parent
S = NS_PER_S


def in_loop(test, **options):
    """Run ``await test(loop)`` in a fresh universe."""

    async def main():
        return await test(asyncio.get_running_loop())

    return run_sim(main, **options)


# --- the calendar -----------------------------------------------------------------------------------------


def test_entries_ring_in_order_of_time_then_insertion() -> None:
    env = SimEnv()
    rang = []
    for name, delay in (("c", 5), ("a", 1), ("d", 5), ("b", 1)):
        env.timeout(delay).callbacks.append(lambda _, name=name: rang.append((env.now, name)))
    env.run()
    assert rang == [(1, "a"), (1, "b"), (5, "c"), (5, "d")]


def test_a_cancelled_entry_neither_rings_nor_moves_the_clock() -> None:
    env = SimEnv()
    near, far = env.timeout(5), env.timeout(3600)
    env.cancel(far)
    env.cancel(far)  # twice is once
    assert (env.live, env.peek()) == (1, 5)
    env.run()
    assert (env.now, env.live, env.peek()) == (5, 0, float("inf"))
    env.cancel(near)  # after it rang: nothing to do
    assert env.live == 0


def test_many_cancelled_entries_are_swept_out() -> None:
    env = SimEnv()
    queue = env._queue
    entries = [env.timeout(i) for i in range(4 * COMPACT_ABOVE)]
    daemons = [env.daemon_timeout(i) for i in range(COMPACT_ABOVE)]
    for entry in entries[1:] + daemons[1:]:
        env.cancel(entry)
    assert env._queue is queue and len(queue) <= COMPACT_ABOVE + 2
    assert env.live == 1
    env.run()
    assert (env.now, env.live, env._idle, env._dead) == (0, 0, 0, 0)


def test_daemon_entries_ring_but_do_not_count_as_live() -> None:
    env = SimEnv()
    rang = []
    env.daemon_timeout(3, "beat").callbacks.append(lambda event: rang.append((env.now, event.value)))
    cancelled = env.daemon_timeout(4)
    env.timeout(9)
    assert env.live == 1
    env.cancel(cancelled)
    assert env.live == 1
    env.run()
    assert rang == [(3, "beat")] and env.now == 9 and env.live == 0


def test_fractions_of_a_nanosecond_and_untriggered_events_are_refused() -> None:
    env = SimEnv()
    with pytest.raises(TypeError, match="whole nanoseconds"):
        env.timeout(1.5)
    with pytest.raises(ValueError, match="never triggered"):
        env.cancel(env.event())
    with pytest.raises(ValueError, match="negative"):
        env.daemon_timeout(-1)
    with pytest.raises(simpy.core.EmptySchedule):
        env.step()


def test_simpy_runs_on_the_calendar_as_on_its_own() -> None:
    def customer(env, desk, log, name):
        with desk.request() as request:
            yield request
            yield env.timeout(10)
            log.append((env.now, name))

    def story(env):
        log = []
        desk = simpy.Resource(env, capacity=2)
        for name in "abcde":
            env.process(customer(env, desk, log, name))
        stop = env.timeout(20)
        stop.callbacks.append(lambda _: log.append("first"))
        env.run(until=stop)
        log.append(env.now)
        env.run(until=25)
        env.run()
        return log

    assert story(SimEnv()) == story(simpy.Environment())


def test_a_failed_event_nobody_handles_raises_the_original_error() -> None:
    class Picky(Exception):
        def __init__(self, *, why: str) -> None:
            super().__init__(why)

    env = SimEnv()
    env.event().fail(Picky(why="keyword only"))
    with pytest.raises(Picky, match="keyword only"):
        env.run()


# --- time -------------------------------------------------------------------------------------------------


def test_a_timer_rings_at_the_first_nanosecond_that_is_not_early() -> None:
    draw = random.Random("instants").random
    for when in [0.0, 0.1 + 0.2, 1e-9, 1e6 + 0.1, 8e6 + 1e-7, *(draw() * 10 ** (i % 7) for i in range(2000))]:
        nanos = ns_not_before(when)
        assert nanos / 1e9 >= when and (nanos == 0 or (nanos - 1) / 1e9 < when)


def test_timers_with_one_deadline_ring_in_the_order_they_were_set() -> None:
    async def test(loop):
        rang = []
        for i in range(12):
            loop.call_later(0.5, rang.append, i)
            loop.call_at_ns(S // 2, lambda i=i: rang.append(100 + i))
        await anyio.sleep(1)
        return rang

    # A TimerHandle goes through the ready queue, so each pair keeps its order too.
    assert in_loop(test) == [value for i in range(12) for value in (i, 100 + i)]


def test_a_bell_wakes_its_task_in_the_same_instant_and_may_ring_for_one_that_was_cancelled() -> None:
    async def test(loop):
        woken = []

        async def waits(bell):
            await bell.wait()
            woken.append(loop.now_ns())

        heard, unheard = Bell(), Bell()
        tasks = [asyncio.create_task(waits(bell)) for bell in (heard, unheard)]
        await loop.sleep_ns(7)
        heard.set()
        heard.set()
        tasks[1].cancel()
        unheard.set()
        await asyncio.wait(tasks)
        return woken, loop.now_ns(), tasks[1].cancelled()

    assert in_loop(test) == ([7], 7, True)


def test_hours_pass_in_no_time_and_exactly() -> None:
    async def test(loop):
        await anyio.sleep(3600)
        await loop.sleep_ns(7)
        assert (anyio.current_time(), loop.now_ns()) == (loop.time(), 3600 * S + 7)
        await loop.sleep_ns(0)
        loop.call_at(loop.time() - 10, lambda: None)  # past: now
        loop.call_at_ns(0, lambda: None)
        await anyio.sleep(0.25)
        return loop.now_ns()

    assert in_loop(test) == 3600 * S + 7 + S // 4


def test_cancelled_timers_do_not_move_the_clock() -> None:
    async def test(loop):
        loop.call_later(100, lambda: None).cancel()
        loop.call_at_ns(200 * S, lambda: pytest.fail("rang")).cancel()
        rang = loop.call_at_ns(S, lambda: None)
        task = asyncio.create_task(loop.sleep_ns(300 * S))
        await anyio.sleep(1)
        rang.cancel()
        task.cancel()
        with anyio.move_on_after(400):
            await anyio.sleep(1)
        assert loop.env.live == 0 and task.cancelled()
        return loop

    loop = in_loop(test)
    assert loop.now_ns() == 2 * S and loop.env.peek() == float("inf")


def test_a_timer_at_infinity_never_rings() -> None:
    async def test(loop):
        handle = loop.call_at(float("inf"), lambda: None)
        assert loop.env.live == 0
        handle.cancel()
        await anyio.sleep_forever()

    with pytest.raises(Deadlock):
        in_loop(test)


def test_a_negative_sleep_is_refused() -> None:
    async def test(loop):
        with pytest.raises(ValueError, match="-1 ns"):
            await loop.sleep_ns(-1)

    in_loop(test)


# --- the bridge to SimPy ----------------------------------------------------------------------------------


def test_a_task_waits_for_simpy_and_gets_the_value() -> None:
    async def test(loop):
        def machine():
            yield loop.env.timeout(5 * S)
            return "done"

        process = loop.env.process(machine())
        assert await loop.until(process) == "done"
        assert await loop.until(process) == "done"  # long over
        return loop.now_ns()

    assert in_loop(test) == 5 * S


def test_a_failed_event_reaches_its_waiters_as_the_very_same_error() -> None:
    async def test(loop):
        error = ValueError("broken")
        event = loop.env.event()
        waiters = [loop.until(event), loop.until(event)]
        event.fail(error)
        outcomes = await asyncio.gather(*waiters, return_exceptions=True)
        assert all(outcome is error for outcome in outcomes)
        with pytest.raises(ValueError, match="broken"):
            await loop.until(event)

    in_loop(test)


@pytest.mark.parametrize("succeed", [True, False])
def test_a_cancelled_waiter_is_passed_over(succeed: bool) -> None:
    async def test(loop):
        event = loop.env.event()
        gone, stays = loop.until(event), loop.until(event)
        with anyio.move_on_after(1):
            await gone
        event.succeed(7) if succeed else event.fail(OSError("late"))
        if succeed:
            assert await stays == 7
        else:
            with pytest.raises(OSError, match="late"):
                await stays
        assert gone.cancelled()

    in_loop(test)


def test_a_sleep_that_rings_while_it_is_being_cancelled_is_left_alone() -> None:
    async def test(loop):
        sleeper = asyncio.create_task(loop.sleep_ns(S))
        await asyncio.sleep(0)
        # Both at one instant: the future is cancelled, then the entry rings before the task could clean up.
        loop.call_at_ns(S, sleeper.cancel)
        nap = loop.env._queue[0][3]
        nap.future.cancel()
        nap.wake()
        with pytest.raises(asyncio.CancelledError):
            await sleeper

    in_loop(test)


# --- how a run ends ---------------------------------------------------------------------------------------


def test_nothing_left_to_happen_is_a_deadlock_that_names_who_waits() -> None:
    async def waits_for_ever() -> None:
        await anyio.Event().wait()

    async def test(loop):
        async with anyio.create_task_group() as group:
            group.start_soon(waits_for_ever, name="p1")
            group.start_soon(waits_for_ever, name="p2")
            loop.create_task(waits_for_ever())
            await anyio.sleep(2.5)

    with pytest.raises(Deadlock) as raised:
        in_loop(test)
    text = str(raised.value)
    assert "4 unfinished at 2.5 s" in text
    assert text.index("p1 waits in") < text.index("p2 waits in")
    assert "waits_for_ever:" in text and "task-4 waits" in text
    assert "0x" not in text and "/" not in text


def test_daemons_alone_do_not_keep_a_run_alive() -> None:
    beats = []

    async def heart(loop) -> None:
        while True:
            await anyio.sleep(1)
            beats.append(loop.now_ns() // S)

    async def test(loop):
        async with anyio.create_task_group() as group:
            with daemon_timers():
                group.start_soon(heart, loop)
            await anyio.sleep(3.5)
            await anyio.Event().wait()

    with pytest.raises(Deadlock, match=r"3\.5 s"):
        in_loop(test)
    assert beats == [1, 2, 3]


def test_every_way_to_set_a_timer_can_be_a_daemon() -> None:
    async def test(loop):
        with daemon_timers():
            loop.call_later(9, lambda: None)
            with daemon_timers(False):
                loop.call_later(1, lambda: None)
            naps = asyncio.create_task(loop.sleep_ns(9 * S))
            await asyncio.sleep(0)
        loop.call_at_ns(9 * S, lambda: None, daemon=True)
        loop.env.daemon_timeout(9 * S)
        live = loop.env.live
        naps.cancel()
        return live

    assert in_loop(test) == 1


def test_the_hook_at_quiescence_may_keep_the_run_going() -> None:
    async def test(loop):
        asked = []
        event, later = anyio.Event(), anyio.Event()

        def hook() -> None:
            asked.append(loop.now_ns())
            if len(asked) == 1:
                event.set()
            else:
                loop.call_at_ns(5 * S, later.set)

        loop.on_quiescent = hook
        await event.wait()
        await later.wait()
        return asked, loop.now_ns()

    assert in_loop(test) == ([0, 0], 5 * S)


def test_the_hook_may_cancel_or_raise_its_own_verdict() -> None:
    async def cancelled(loop):
        with anyio.CancelScope() as scope:
            loop.on_quiescent = scope.cancel
            await anyio.sleep_forever()
        return "went on"

    async def refused(loop):
        def hook() -> None:
            raise Deadlock("p1 waits for p2")

        loop.on_quiescent = hook
        await anyio.sleep_forever()

    async def useless(loop):
        loop.on_quiescent = lambda: None
        await anyio.sleep_forever()

    assert in_loop(cancelled) == "went on"
    with pytest.raises(Deadlock, match="p1 waits for p2"):
        in_loop(refused)
    with pytest.raises(Deadlock, match="nothing will happen"):
        in_loop(useless)


@pytest.mark.parametrize("policy", [None, Walk(3)])
def test_after_the_verdict_everybody_cleans_up_and_nobody_is_asked_again(policy) -> None:
    log = []

    async def careful(name: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with daemon_timers(), anyio.CancelScope(shield=True):
                await anyio.sleep(1)
            log.append(name)

    async def test(loop):
        loop.on_quiescent = lambda: log.append("asked")
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(careful, name)

    with pytest.raises(Deadlock):
        in_loop(test, policy=policy)
    assert log == ["asked", "a", "b", "c"]


def test_a_task_that_ignores_its_cancellation_cannot_hide_the_first_verdict() -> None:
    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()

    async def restless(loop) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await loop.sleep_ns(S)

    async def test(loop):
        loop.stubborn = loop.create_task(stubborn(), name="mule")
        await anyio.sleep_forever()

    async def test_restless(loop):
        loop.restless = loop.create_task(restless(loop))
        await loop.sleep_ns(S)
        raise LookupError("the verdict")

    with pytest.raises(Deadlock, match="nothing will happen") as raised:
        in_loop(test)
    assert any("mule" in note for note in raised.value.__notes__)
    with pytest.raises(Livelock, match="clean-up"):
        in_loop(test_restless)


def test_endless_work_within_an_instant_is_a_livelock_with_the_last_labels() -> None:
    async def ping() -> None:
        while True:
            await asyncio.sleep(0)

    def pong(env):
        while True:
            yield env.timeout(0)

    async def in_tasks(loop):
        await anyio.sleep(1)
        async with anyio.create_task_group() as group:
            group.start_soon(ping, name="ping")

    async def in_simpy(loop):
        await loop.until(loop.env.process(pong(loop.env)))

    for policy in (None, Walk(1)):
        with pytest.raises(Livelock, match=r"within the instant 1 s.*ping, ping") as raised:
            in_loop(in_tasks, instant_steps_max=500, policy=policy)
        assert not hasattr(raised.value, "__notes__")  # the drain found an end
    with pytest.raises(Livelock, match="Timeout, Timeout"):
        in_loop(in_simpy, instant_steps_max=500)


def test_many_steps_spread_over_time_are_no_livelock() -> None:
    async def test(loop):
        for _ in range(300):
            await loop.sleep_ns(1)

    in_loop(test, instant_steps_max=100)


def test_an_error_nobody_caught_fails_the_run() -> None:
    async def in_callback(loop):
        loop.call_soon(lambda: 1 / 0)
        await anyio.sleep(1)

    async def in_alarm(loop):
        loop.call_at_ns(S, lambda: 1 / 0)
        await anyio.sleep(2)

    async def in_forgotten_task(loop):
        async def fails() -> None:
            raise ZeroDivisionError

        loop.create_task(fails())
        await anyio.sleep(1)

    async def in_words(loop):
        loop.call_exception_handler({"message": "odd thing at 0xdeadbeef"})
        await anyio.sleep(1)

    async def at_the_very_end(loop):
        async def fails_when_cancelled() -> None:
            try:
                await anyio.sleep(9)
            finally:
                raise ZeroDivisionError

        loop.forgotten = loop.create_task(fails_when_cancelled())
        await anyio.sleep(1)

    for test in (in_callback, in_alarm, in_forgotten_task, at_the_very_end):
        with pytest.raises(ZeroDivisionError):
            in_loop(test)
    with pytest.raises(SimulationError, match=r"^odd thing$"):
        in_loop(in_words)


def test_the_main_error_comes_through_with_later_ones_as_notes() -> None:
    async def test(loop):
        async def fails_when_cancelled() -> None:
            try:
                await anyio.sleep(9)
            finally:
                raise OSError("second")

        loop.forgotten = loop.create_task(fails_when_cancelled())
        await anyio.sleep(1)
        raise LookupError("first")

    with pytest.raises(LookupError, match="first") as raised:
        in_loop(test)
    assert raised.value.__notes__ == ["later: OSError: second"]


def test_the_world_is_built_before_the_first_step_and_a_broken_one_leaves_nothing_behind() -> None:
    def broken(loop) -> None:
        raise LookupError("no such node")

    async def test(loop):
        return loop.world

    assert in_loop(test, setup=lambda loop: setattr(loop, "world", "built")) == "built"
    with pytest.raises(LookupError, match="no such node"):
        in_loop(test, setup=broken)
    assert gc.isenabled()


def test_the_collector_is_off_during_the_run_only() -> None:
    async def test(loop):
        return gc.isenabled()

    assert in_loop(test) is False
    assert gc.isenabled()


def test_ctrl_c_in_a_running_simulation_cancels_main_and_lets_it_clean_up() -> None:
    log = []

    async def test(loop):
        loop.call_at_ns(S, lambda: signal.raise_signal(signal.SIGINT))
        try:
            while True:
                await anyio.sleep(0.3)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)
            log.append(loop.now_ns())

    for policy in (None, Walk(1)):
        with pytest.raises(KeyboardInterrupt):
            in_loop(test, policy=policy)
    assert log == [6 * S, 6 * S]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_real_sigint_from_outside_interrupts_a_busy_simulation() -> None:
    script = """
        import asyncio, anyio
        from backends.sim.loop import run_sim

        async def busy():
            loop = asyncio.get_running_loop()
            while True:
                await loop.sleep_ns(10)

        async def main():
            try:
                async with anyio.create_task_group() as group:
                    for _ in range(20):
                        group.start_soon(busy)
                    print("running", flush=True)
            finally:
                print("cleaned up", flush=True)

        try:
            run_sim(main)
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "running\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (out, err, process.returncode) == ("cleaned up\ninterrupted\n", "", 0)


# --- the fence --------------------------------------------------------------------------------------------

OUTSIDE_CALLS = {
    "time.time": lambda: time.time(),
    "time.monotonic": lambda: time.monotonic(),
    "time.perf_counter_ns": lambda: time.perf_counter_ns(),
    "time.sleep": lambda: time.sleep(0),
    "os.urandom": lambda: os.urandom(1),
    "uuid.uuid4": lambda: uuid.uuid4(),
    "random.random": lambda: random.random(),
    "random.choice": lambda: random.choice("a"),
    "random.seed": lambda: random.seed(1),
    "threading.Thread.start": lambda: threading.Thread(target=int).start(),
}


@pytest.mark.parametrize("call", OUTSIDE_CALLS)
def test_the_real_world_is_out_of_reach_and_the_error_says_what_to_do(call: str) -> None:
    async def test(loop):
        with pytest.raises(FencedCall, match=rf"{call}\(\) was called under virtual time; .+unfenced"):
            OUTSIDE_CALLS[call]()
        with unfenced():
            OUTSIDE_CALLS[call]()

    in_loop(test)
    OUTSIDE_CALLS[call]()


def test_everything_is_put_back_however_the_run_ended() -> None:
    def real():
        return [time.time, time.monotonic, time.sleep, os.urandom, uuid.uuid4, random.random, threading.Thread.start]

    async def fails(loop):
        assert all(now is not then for now, then in zip(real(), before, strict=True))
        raise LookupError

    before = real()
    with pytest.raises(LookupError):
        in_loop(fails)
    assert real() == before
    with fenced():
        patched = time.time = lambda: 42  # by somebody who will put it back himself
    assert time.time is patched
    time.time = before[0]
    assert real() == before


def test_a_guard_kept_beyond_the_run_is_harmless() -> None:
    async def test(loop):
        class Stopwatch:
            clock = time.monotonic

        return Stopwatch

    assert in_loop(test)().clock() <= time.monotonic()


def test_other_threads_are_not_fenced() -> None:
    seen = []

    async def test(loop):
        with unfenced():
            thread = threading.Thread(target=lambda: seen.append(time.time()))
            thread.start()
            thread.join()

    in_loop(test)
    assert seen


def test_logging_may_stamp_its_records(caplog) -> None:
    import logging

    async def test(loop):
        logging.getLogger("turnstile.test").warning("hello")

    in_loop(test)
    assert [record.message for record in caplog.records] == ["hello"]


def test_a_record_factory_and_a_handler_of_another_library_may_look_at_the_clock() -> None:
    """Ray's factory stamps its records, also those of a run that happens to share the process with it."""
    import logging

    stamps = []

    class Stamping(logging.Handler):
        def emit(self, record):
            stamps.append((record.ct, time.time_ns(), record.funcName))

    def factory(*args, **kwargs):
        record = logging.LogRecord(*args, **kwargs)
        record.ct = time.time_ns()
        return record

    async def test(loop):
        logger.warning("hello")
        with pytest.raises(FencedCall):
            time.time_ns()

    logger = logging.Logger("stamped")
    logger.addHandler(Stamping())
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(factory)
    try:
        in_loop(test)
    finally:
        logging.setLogRecordFactory(before)
    ((made, handled, caller),) = stamps
    assert made <= handled and caller == "test"


def test_an_open_gate_is_open_for_its_own_task_only() -> None:
    async def display() -> None:
        with unfenced():
            await anyio.sleep(1)
            time.time()

    async def test(loop):
        async with anyio.create_task_group() as group:
            group.start_soon(display)
            await anyio.sleep(0.5)
            with pytest.raises(FencedCall):
                time.time()

    in_loop(test)


def test_threads_sockets_signals_and_executors_are_refused_at_the_call() -> None:
    async def test(loop):
        with pytest.raises(FencedCall, match="Thread"):
            await anyio.to_thread.run_sync(int)
        for call in (
            lambda: loop.run_in_executor(None, int),
            lambda: loop.create_connection(None, "host", 1),
            lambda: loop.add_signal_handler(2, int),
            lambda: loop.set_task_factory(asyncio.Task),
            lambda: loop.create_task(None, eager_start=True),
        ):
            with pytest.raises(FencedCall):
                call()
        loop.set_task_factory(None)

    in_loop(test)


def test_a_call_from_another_thread_fails_there_and_fails_the_run() -> None:
    caught = []

    async def test(loop):
        def foreign() -> None:
            try:
                loop.call_soon_threadsafe(int)
            except FencedCall as error:
                caught.append(error)

        with unfenced():
            thread = threading.Thread(target=foreign)
            thread.start()
            thread.join()
        await anyio.sleep(1)

    with pytest.raises(FencedCall, match="another thread"):
        in_loop(test)
    assert caught


# --- anyio and asyncio as tenants ---------------------------------------------------------------------------


def test_scopes_groups_and_streams_work_in_virtual_time() -> None:
    async def producer(send) -> None:
        async with send:
            for i in range(4):
                await anyio.sleep(1)
                await send.send(i)

    async def test(loop):
        got = []
        send, receive = anyio.create_memory_object_stream[int](1)
        async with anyio.create_task_group() as group:
            group.start_soon(producer, send)
            async with receive:
                async for item in receive:
                    got.append((item, loop.time()))
        with anyio.move_on_after(2.5) as scope:
            await anyio.sleep(10)
        assert scope.cancelled_caught and loop.time() == 6.5
        with pytest.raises(TimeoutError), anyio.fail_after(0.1 + 0.2):
            await anyio.sleep_forever()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1)
        return got

    assert in_loop(test) == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]


def test_deadlines_never_spin() -> None:
    async def test(loop):
        for i in range(1, 200):
            with anyio.move_on_after(i / 7):
                await anyio.sleep_forever()

    in_loop(test, instant_steps_max=50)


def test_a_failing_child_cancels_its_siblings_and_the_group_reports_it() -> None:
    async def fails() -> None:
        await anyio.sleep(1)
        raise LookupError("child")

    async def test(loop):
        with pytest.raises(ExceptionGroup) as raised:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 50)
                group.start_soon(fails)
        assert [str(error) for error in raised.value.exceptions] == ["child"]
        return loop.now_ns()

    assert in_loop(test) == S


def test_context_variables_follow_the_task() -> None:
    who = contextvars.ContextVar("who", default="nobody")

    async def child(seen, loop) -> None:
        await loop.sleep_ns(1)
        seen.append(who.get())
        loop.call_later(1, lambda: seen.append(who.get()))

    async def test(loop):
        seen = []
        async with anyio.create_task_group() as group:
            for name in "ab":
                who.set(name)
                group.start_soon(child, seen, loop)
        who.set("c")
        await anyio.sleep(2)
        return seen

    assert in_loop(test) == ["a", "b", "a", "b"]


def test_unfinished_generators_are_closed_at_the_end() -> None:
    closed = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            await anyio.sleep(0)
            closed.append(True)

    async def test(loop):
        loop.kept = numbers()
        async for _ in loop.kept:
            break

    in_loop(test)
    assert closed == [True]


def test_debug_mode_works() -> None:
    async def test(loop):
        loop.set_debug(True)
        handle = loop.call_later(1, lambda: None)
        assert handle._source_traceback
        await anyio.sleep(2)

    in_loop(test)


def test_tasks_are_named_and_hashed_by_their_birth() -> None:
    async def test(loop):
        first, second = (loop.create_task(anyio.sleep(0)) for _ in range(2))
        named = loop.create_task(anyio.sleep(0), name="")
        assert isinstance(first, SimTask) and first != second
        assert hash(second) == hash(first) + 1 and first.get_name() == f"task-{hash(first)}"
        assert named.get_name() == ""
        await asyncio.wait([first, second, named])

    in_loop(test)


def test_wakeups_queued_together_run_by_birth_but_spawned_tasks_keep_their_turn() -> None:
    async def waiter(log, event, name) -> None:
        await event
        log.append(name)

    async def test(loop):
        log, futures = [], [loop.create_future() for _ in range(4)]
        async with anyio.create_task_group() as group:
            for name, future in enumerate(futures):
                group.start_soon(waiter, log, future, name)
            await anyio.sleep(0)
            for future in reversed(futures):
                future.set_result(None)
        return log

    assert in_loop(test) == [0, 1, 2, 3]


# --- the one choice -----------------------------------------------------------------------------------------


async def _three_steps(loop):
    log = []

    async def step(name) -> None:
        log.append(name)
        await asyncio.sleep(0)
        log.append(name.upper())

    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(step, name, name=name)
    return "".join(log), loop.decisions


def test_fifo_makes_no_decisions() -> None:
    assert in_loop(_three_steps) == ("abcABC", [])
    assert in_loop(_three_steps, policy=Fifo()) == ("abcABC", [])


def test_holding_nothing_is_fifo_and_every_decision_is_recorded() -> None:
    order, decisions = in_loop(_three_steps, policy=Holds({}))
    assert order == "abcABC"
    assert [decision.index for decision in decisions] == list(range(len(decisions)))
    assert decisions[0].labels == ("a", "b", "c") and decisions[0].holds == 0


def test_a_held_step_waits_until_the_rest_of_the_instant_is_idle() -> None:
    assert in_loop(_three_steps, policy=Holds({0: 1}))[0] == "bcBCaA"
    assert in_loop(_three_steps, policy=Holds({0: 2}))[0] == "cCabAB"
    assert in_loop(_three_steps, policy=Holds({0: 99}))[0] == "cCabAB"  # capped: somebody has to run


def test_holds_end_before_the_clock_moves() -> None:
    async def test(loop):
        log = []

        async def late(name, delay) -> None:
            await loop.sleep_ns(delay)
            log.append((name, loop.now_ns()))

        async with anyio.create_task_group() as group:
            group.start_soon(late, "a", 0)
            group.start_soon(late, "b", 0)
            group.start_soon(late, "c", 1)
        return log

    order = in_loop(test, policy=Holds(dict.fromkeys(range(50), 1)))
    assert sorted(order) == [("a", 0), ("b", 0), ("c", 1)] and order[-1] == ("c", 1)


def test_a_timer_can_ring_between_two_ready_steps() -> None:
    async def test(loop):
        log = []

        async def step(name) -> None:
            await asyncio.sleep(0)
            log.append(name)

        loop.call_at_ns(0, lambda: log.append("timer"))
        async with anyio.create_task_group() as group:
            group.start_soon(step, "a")
            group.start_soon(step, "b")
        await anyio.sleep(1)
        return log

    seen = {tuple(in_loop(test, policy=Walk(seed))) for seed in range(40)}
    assert ("a", "timer", "b") in seen and ("a", "b", "timer") in seen and ("timer", "a", "b") in seen


def test_a_walk_reaches_every_order_and_each_replays_as_holds() -> None:
    async def test(loop):
        log = []

        async def step(name) -> None:
            log.append(name)

        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(step, name, name=name)
        return "".join(log), loop.decisions

    orders = {}
    for seed in range(120):
        order, decisions = in_loop(test, policy=Walk(seed))
        orders[order] = decisions
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    for order, decisions in orders.items():
        script = {decision.index: decision.holds for decision in decisions if decision.holds}
        assert in_loop(test, policy=Holds(script)) == (order, decisions)


@pytest.mark.parametrize("policy", [Walk(5), Walk(5, p=0.25), Holds(dict.fromkeys(range(10_000), 1)), Holds({0: 3})])
def test_cancelled_tasks_on_hold_do_not_spin(policy) -> None:
    async def child() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)

    async def test(loop):
        with anyio.move_on_after(1):
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(child)
        return loop.now_ns()

    assert in_loop(test, policy=policy, instant_steps_max=2_000) == 2 * S


def test_task_steps_and_callbacks_are_told_apart() -> None:
    async def test(loop):
        kinds = {}
        future = loop.create_future()

        async def waits() -> None:
            await future

        task = loop.create_task(waits())
        kinds["first step"] = is_step(loop._ready[-1])
        await asyncio.sleep(0)
        future.set_result(None)
        kinds["wake-up"] = is_step(loop._ready[-1])
        kinds["method of a task"] = is_step(loop.call_soon(task.get_name))
        kinds["callback"] = is_step(loop.call_soon(int))
        await task
        return kinds

    assert in_loop(test) == {"first step": True, "wake-up": True, "method of a task": False, "callback": False}


def test_a_crowd_is_looked_at_in_part() -> None:
    async def test(loop):
        async with anyio.create_task_group() as group:
            for _ in range(3 * CANDIDATES_MAX):
                group.start_soon(anyio.sleep, 1)
        return max(len(decision.labels) for decision in loop.decisions)

    assert in_loop(test, policy=Holds({0: 10**6})) == CANDIDATES_MAX + 1


def test_the_chooser_drops_nothing_when_it_stops_early() -> None:
    loop = SimLoop()
    chooser = Chooser(Holds({0: 1}), loop._ready, loop.env, loop.decisions)

    async def nothing() -> None:
        pass

    tasks = [loop.create_task(nothing()) for _ in range(2)]
    handle = chooser.take()
    chooser.release()
    loop._ready.append(handle)
    loop.run_until_complete(asyncio.wait(tasks))
    loop.close()
    assert all(task.done() for task in tasks)
