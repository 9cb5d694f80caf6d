"""An asyncio event loop on virtual time: SimPy's heap is the calendar, unmodified anyio code is the tenant.

Rules of this room:

1. Ready work runs first, one handle at a time; when none is left, *one* calendar entry rings. So the clock moves
   only when nothing is ready, and a timer never rings early.
2. Every order is FIFO, or chosen by a policy, or sorted by birth. Nothing comes from an address, a hash seed or a
   real clock: tasks hash by birth number, and wake-ups queued together are sorted by it, because anyio cancels by
   walking sets that are ordered by address.
3. Nothing passes silently: no work left is ``Deadlock``, no end of work within an instant is ``Livelock``, an error
   nobody caught fails the run.
4. The first failure is the verdict. After it, or after the main task, the loop only *drains*: FIFO, no deadlock
   hook, a bounded number of steps, so that cancelled tasks can clean up.

``asyncio.BaseEventLoop`` supplies all that is not about time, order or the outside world.
"""

import asyncio
import contextvars
import gc
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import anyio
import simpy

from backends.sim.calendar import Alarm, Nap, SimEnv, ns_not_before
from backends.sim.fence import fenced
from backends.sim.policies import Chooser, Decision, Fifo, Policy, label
from core.errors import Deadlock, FencedCall, Livelock, SimulationError
from core.units import NS_PER_S, show_s

T = TypeVar("T")

# No honest instant takes this many steps.
INSTANT_STEPS_MAX = 100_000
# A drain only unwinds; whoever keeps it going for longer ignores its cancellation.
DRAIN_STEPS_MAX = 100_000
# How many of the last steps a Livelock names, and how many waiting tasks a Deadlock.
STEPS_NAMED = 16
TASKS_NAMED = 40

_NEVER = float("inf")
_daemon: contextvars.ContextVar[bool] = contextvars.ContextVar("turnstile_daemon_timers", default=False)
_in_daemon_context = _daemon.get
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@contextmanager
def daemon_timers(on: bool = True) -> Iterator[None]:
    """Timers made in this context, and by tasks spawned in it, are daemons: nobody's progress hangs on them."""
    token = _daemon.set(on)
    try:
        yield
    finally:
        _daemon.reset(token)


class SimTask(asyncio.Task):
    """A task that hashes by its birth number, so that every set of tasks iterates alike in every process."""

    __slots__ = ("birth",)

    def __init__(self, coro: Any, *, loop: "SimLoop", name: object = None, context: Any = None) -> None:
        loop.births += 1
        self.birth = loop.births  # before the base class, which already puts the task into a set
        super().__init__(coro, loop=loop, name=f"task-{self.birth}" if name is None else name, context=context)

    def __hash__(self) -> int:
        return self.birth

    def __repr__(self) -> str:
        """Short, and without an address: anyio writes it into every cancellation."""
        return f"<{self.get_name()}>"


class Ready(asyncio.Handle):
    """What ``call_soon`` returns: the base class without its question for the debug mode, which is asked already."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: "SimLoop", context: Any) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class Timer(asyncio.TimerHandle):
    """What ``call_at`` returns, and its own calendar entry: no second object, no reference cycle."""

    __slots__ = ("callbacks", "daemon")
    _ok = True

    def __init__(self, when: float, callback: Any, args: Any, loop: "SimLoop", context: Any) -> None:
        if loop._debug:
            super().__init__(when, callback, args, loop, context)
            return
        # What the two base classes do, without their four calls: timers are half the price of anyio.sleep().
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None
        self._when = when


class SimLoop(asyncio.BaseEventLoop):
    """The loop. Use it through ``run_sim``, or as anyio's ``loop_factory``."""

    def __init__(self, *, policy: Policy | None = None, instant_steps_max: int = INSTANT_STEPS_MAX) -> None:
        super().__init__()
        self.env = SimEnv()
        self.births = 0
        self.on_quiescent: Callable[[], None] | None = None
        self.decisions: list[Decision] = []  # made by a policy other than Fifo
        self.errors: list[BaseException] = []  # what nobody caught
        self.failure: BaseException | None = None  # the first thing that ended the run from inside the loop
        self._policy = None if isinstance(policy, Fifo) else policy
        self._instant_steps_max = instant_steps_max
        self._draining = False
        self._last_steps: list[str] = []
        self._home = threading.get_ident()
        self._ring_timer = (self._ready.append,)

    # -- time

    def time(self) -> float:
        return self.env._now / NS_PER_S

    def now_ns(self) -> int:
        """Nanoseconds of virtual time since the run began."""
        return self.env._now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        if self._debug or self._closed:
            return super().call_soon(callback, *args, context=context)
        handle = Ready(callback, args, self, context)  # what the base does, three calls cheaper
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Timer:
        self._check_closed()
        if self._debug:
            self._check_thread()
            self._check_callback(callback, "call_at")
        timer = Timer(when, callback, args, self, context)
        if when == _NEVER:  # not on the calendar at all
            timer.callbacks = None
            return timer
        timer.callbacks = self._ring_timer
        timer._scheduled = True
        env, when_ns = self.env, ns_not_before(when)
        env.push(timer, when_ns if when_ns > env._now else env._now, _in_daemon_context())
        return timer

    def _timer_handle_cancelled(self, handle: Timer) -> None:
        if handle.callbacks is not None:  # asyncio.sleep() cancels its timer even after it rang
            self.env.cancel(handle)

    def call_at_ns(self, when_ns: int, callback: Callable[[], None], *, daemon: bool = False) -> Alarm:
        """Run ``callback`` between two steps at ``when_ns`` (now, if that is past); its errors end the run."""
        if self._closed:
            self._check_closed()
        env = self.env
        alarm = Alarm(env, callback)
        env.push(alarm, when_ns if when_ns > env._now else env._now, daemon)
        return alarm

    async def sleep_ns(self, nanos: int) -> None:
        """Sleep exactly this long, at half the price of ``anyio.sleep``."""
        if nanos < 0:
            raise ValueError(f"cannot sleep {nanos} ns")
        env = self.env
        nap = Nap(asyncio.Future(loop=self))
        env.push(nap, env._now + nanos, _in_daemon_context())
        try:
            await nap.future
        finally:
            if nap.callbacks is not None:
                env.cancel(nap)

    def until(self, event: simpy.Event) -> asyncio.Future:
        """A future with the outcome of a SimPy event. Cancelling the future leaves the event alone."""
        future: asyncio.Future = asyncio.Future(loop=self)
        if event.callbacks is None:
            _settle(future, event)
        else:
            event.callbacks.append(partial(_settle, future))
        return future

    # -- work

    def create_task(self, coro: Any, *, name: object = None, context: Any = None, **options: Any) -> SimTask:
        if options.get("eager_start"):
            raise FencedCall("eager tasks run outside the loop's order; create the task without eager_start")
        self._check_closed()
        return SimTask(coro, loop=self, name=name, context=context)

    def set_task_factory(self, factory: Any) -> None:
        if factory is not None:
            raise FencedCall("set_task_factory() is not possible under virtual time: every task has to be a SimTask")

    def _run_once(self) -> None:
        """Run until stopped. Nothing runs anywhere else."""
        if self._stopping and not self._ready:
            return
        try:
            if self._policy is None:
                self._run_fifo()
            else:
                self._run_chosen(self._policy)
            if self.errors and not self._draining:
                raise self.errors[0]
        except BaseException as error:
            if self.failure is None:
                self.failure = error
            self.begin_drain()
            raise

    def begin_drain(self) -> None:
        """From here on only unwind: called by the loop when it fails and by ``run_sim`` when the main task ends."""
        self._draining = True
        self._policy = None

    def _run_fifo(self) -> None:
        ready, env = self._ready, self.env
        take, calendar = ready.popleft, env._queue
        per_instant = 0 if self._draining else self._instant_steps_max
        left = per_instant or DRAIN_STEPS_MAX
        while True:
            while ready:
                handle = take()
                if handle._cancelled:
                    continue
                left -= 1
                if left < STEPS_NAMED:
                    self._near_limit(left, handle)
                queued = len(ready)
                try:  # what Handle._run does, without the call
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._failed(handle, error)
                if len(ready) > queued + 1:
                    self._sort_wakeups(queued, handle)
                if self._stopping:
                    return
            if len(calendar) <= env._idle and self._quiesce():
                continue
            left -= 1
            if left < STEPS_NAMED:
                self._near_limit(left, None)
            before = env._now
            env.step()
            if env._now != before and per_instant:
                left = per_instant
            if len(ready) > 1:
                self._sort_wakeups(0, None)
            if self._stopping:
                return

    def _run_chosen(self, policy: Policy) -> None:
        """The same with a policy asked before each step; ends early when the drain begins."""
        ready, env = self._ready, self.env
        calendar = env._queue
        chooser = Chooser(policy, ready, env, self.decisions)
        left = self._instant_steps_max
        try:
            while not (self._stopping or self._draining):
                handle = chooser.take()
                if handle is None and len(calendar) <= env._idle and not chooser.held and self._quiesce():
                    continue
                left -= 1
                if left < STEPS_NAMED:
                    self._near_limit(left, handle)
                queued, before = len(ready), env._now
                if handle is None:
                    env.step()
                elif not handle._cancelled:
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self._failed(handle, error)
                if env._now != before:
                    left = self._instant_steps_max
                if len(ready) > queued + 1:
                    self._sort_wakeups(queued, handle)
        finally:
            chooser.release()

    def _sort_wakeups(self, first: int, ran: asyncio.Handle | None) -> None:
        """Sort each run of adjacent wake-ups among what was just queued by the birth of the task woken.

        First steps, continuations and the wake-up of the task that ran keep their places: others rely on those.
        """
        ready = self._ready
        runner = getattr(ran._callback, "__self__", None) if ran is not None else None
        run: list[asyncio.Handle] = []
        end = len(ready)  # by index: a signal handler may append while we look
        for i in range(first, end + 1):
            if i < end and _wakes_another(ready[i], runner):
                run.append(ready[i])
                continue
            if len(run) > 1:
                run.sort(key=_birth)
                for offset, handle in enumerate(run, i - len(run)):
                    ready[offset] = handle
            run.clear()

    # -- ends

    def _quiesce(self) -> bool:
        """Nothing is ready and at most daemons remain: ask the hook. True if there is something to do again."""
        if self._draining:
            if self.env.peek() == _NEVER:
                raise Deadlock(f"the run cannot end: {self.who_waits()}")
            return False  # a clean-up may well wait on a daemon timer
        if self.on_quiescent is not None:
            self.on_quiescent()
            if self._ready or self.env.live:
                return True
        raise Deadlock(f"nothing is ready and nothing will happen: {self.who_waits()}")

    def who_waits(self) -> str:
        """The unfinished tasks, oldest first, with the innermost places they wait at."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.birth)
        lines = [f"  {task.get_name()} waits in {_places(task)}" for task in tasks[:TASKS_NAMED]]
        if len(tasks) > TASKS_NAMED:
            lines.append(f"  and {len(tasks) - TASKS_NAMED} more")
        return "\n".join([f"{len(tasks)} unfinished at {show_s(self.now_ns())}", *lines])

    def _near_limit(self, left: int, handle: asyncio.Handle | None) -> None:
        """Note the last steps before the limit, then raise."""
        if left == STEPS_NAMED - 1:
            self._last_steps.clear()
        self._last_steps.append(self._next_entry() if handle is None else label(handle))
        if left < 0:
            if handle is not None:  # it was taken, not run: a task that lost its step could never end
                self._ready.appendleft(handle)
            what = "of clean-up" if self._draining else f"within the instant {show_s(self.now_ns())}"
            raise Livelock(f"no end of steps {what}; the last ones: {', '.join(self._last_steps)}")

    def _next_entry(self) -> str:
        if self.env.peek() == _NEVER:
            return "(nothing)"
        entry: Any = self.env._queue[0][3]
        if isinstance(entry, simpy.Process):
            return entry.name
        return label(entry) if isinstance(entry, Timer) else getattr(entry, "label", type(entry).__name__)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Errors nobody caught end the run, whichever way they came."""
        message = _ADDRESS.sub("", str(context.get("message") or "unhandled error"))
        error = context.get("exception")
        if error is None:
            error = SimulationError(message)
        else:
            error.add_note(message)
        self._fail(error)

    def _failed(self, handle: asyncio.Handle, error: BaseException) -> None:
        """What a callback raised; a task keeps its errors to itself."""
        self.call_exception_handler({"message": f"in callback {label(handle)}", "exception": error, "handle": handle})

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        if self.is_running() and not self._draining:
            self._stopping = True

    # -- the outside world

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        if threading.get_ident() == self._home:  # signal handlers and finalizers of async generators
            return self.call_soon(callback, *args, context=context)
        message = "call_soon_threadsafe() came from another thread; threads have no place in virtual time"
        self._fail(FencedCall(message))
        raise FencedCall(message)

    def _write_to_self(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SimLoop, *args: Any, **kwargs: Any) -> NoReturn:
        raise FencedCall(f"{name}() reaches outside the simulated world; model it with SimPy and loop.until()")

    return refuse


# The base class has no answer to these either; ours says why.
_OUTSIDE = """
run_in_executor getaddrinfo getnameinfo add_signal_handler remove_signal_handler
add_reader remove_reader add_writer remove_writer subprocess_exec subprocess_shell connect_read_pipe connect_write_pipe
create_connection create_server create_unix_connection create_unix_server create_datagram_endpoint
connect_accepted_socket start_tls sendfile sock_recv sock_recv_into sock_recvfrom sock_recvfrom_into sock_sendall
sock_sendto sock_connect sock_accept sock_sendfile
"""
for _name in _OUTSIDE.split():
    setattr(SimLoop, _name, _refusal(_name))


def _settle(future: asyncio.Future, event: simpy.Event) -> None:
    """Carry the outcome of a SimPy event over to the future of whoever waits for it."""
    if event._ok:
        if not future.done():
            future.set_result(event._value)
        return
    event.defused = True  # the waiter answers for it, even one that was cancelled meanwhile
    if not future.done():
        future.set_exception(event._value)


def _wakes_another(handle: asyncio.Handle, runner: object) -> bool:
    callback = handle._callback
    return getattr(callback, "__name__", "") == "task_wakeup" and callback.__self__ is not runner


def _birth(handle: asyncio.Handle) -> int:
    return handle._callback.__self__.birth


def _places(task: asyncio.Task) -> str:
    """The innermost frames a task waits in, outermost first: names and lines, no paths."""
    places = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " > ".join(places[-3:]) or "its first step"


# -- a whole run


def run_sim(
    async_fn: Callable[..., Awaitable[T]],
    *args: Any,
    setup: Callable[[SimLoop], None] | None = None,
    policy: Policy | None = None,
    instant_steps_max: int = INSTANT_STEPS_MAX,
) -> T:
    """Run ``async_fn(*args)`` in a fresh universe and return its result.

    ``setup(loop)`` runs before the first step: build the world there. Raises what the run raised; of several errors
    the first, with the later ones as notes.
    """
    loops: list[SimLoop] = []

    def make_loop() -> SimLoop:
        loops.append(SimLoop(policy=policy, instant_steps_max=instant_steps_max))
        if setup is not None:
            setup(loops[0])
        return loops[0]

    async def main() -> T:
        try:
            return await async_fn(*args)
        finally:
            loops[0].begin_drain()

    try:
        with _collector_off(), fenced():
            result = anyio.run(main, backend="asyncio", backend_options={"loop_factory": make_loop})
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        first = (loops[0].failure or error) if loops else error
        _add_notes(first, [error, *loops[0].errors] if loops else [])
        if first is error:
            raise
        raise first from None
    finally:
        for loop in loops:
            loop.close()  # only still open if setup failed
    if loops[0].errors:  # came to light while the run ended
        raise loops[0].errors[0]
    return result


@contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection during the run: finalizers schedule tasks, at moments that differ between processes.

    Freezing what existed before keeps the one collection afterwards as small as the run.
    """
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if was_on:
            gc.enable()


def _add_notes(first: BaseException, later: list[BaseException]) -> None:
    for error in later:
        if error is not first:
            first.add_note(f"later: {type(error).__name__}: {error}")
