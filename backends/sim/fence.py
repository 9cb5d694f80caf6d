"""The fence around a simulated run: reaching for the real world raises where it happens.

Virtual time is only worth something if nothing real leaks in, and leaks are silent: a thread that finishes late, a
timestamp in a record, an unseeded draw. Rules of this room:

1. Only the fenced thread is fenced, only during the run, and everything is put back afterwards, whatever happened.
2. The error names the call and what to use instead.
3. Display code opens the gate for itself with ``with unfenced():``. The gate belongs to the context, so a task that
   awaits inside it does not open it for others.
4. A few libraries that look at a clock for their own records (``BYSTANDERS``) pass.
5. Writing a log record opens the gate: factories, filters and handlers are whatever the process has set up (Ray's
   record factory reads the clock), and nothing of theirs gets into a run.

Out of reach, hence banned by tests over the source instead: names imported by value before the run
(``from time import monotonic``), ``datetime.now()``, and ``random.Random()`` without a seed.
"""

import functools
import logging
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from core.errors import FencedCall

CLOCK = "read the virtual clock: anyio.current_time(), or loop.now_ns()"
SLEEP = "await anyio.sleep(), or loop.sleep_ns()"
DRAW = "draw from a random.Random that is seeded by what it is for"
THREAD = "start an anyio task: threads have no place in virtual time"

# They stamp log records, time garbage collections or trace a test; nothing they read gets into a run.
BYSTANDERS = frozenset({"logging", "hypothesis", "_pytest", "pytest", "coverage", "pdb", "bdb", "cProfile"})

_gate_open: ContextVar[bool] = ContextVar("turnstile_fence_open", default=False)
_lock = threading.Lock()
_fenced_threads: list[int] = []
_put_back: list[tuple[Any, str, Any, Any]] = []  # (owner, attribute, what was there, our guard)


@contextmanager
def unfenced() -> Iterator[None]:
    """Let this context reach the real world: for display and log writing, never for anything that decides."""
    token = _gate_open.set(True)
    try:
        yield
    finally:
        _gate_open.reset(token)


@contextmanager
def fenced() -> Iterator[None]:
    """Fence the calling thread for the length of the block."""
    me = threading.get_ident()
    with _lock:
        if not _fenced_threads:
            _install()
        _fenced_threads.append(me)
    try:
        yield
    finally:
        with _lock:
            _fenced_threads.remove(me)
            if not _fenced_threads:
                _restore()


def check(call: str, fix: str, caller: str) -> None:
    """Raise ``FencedCall`` if ``caller`` (a module name) may not make ``call`` here and now."""
    if threading.get_ident() not in _fenced_threads or _gate_open.get() or caller.partition(".")[0] in BYSTANDERS:
        return
    raise FencedCall(f"{call}() was called under virtual time; {fix} (display code: with unfenced())")


class _Guard:
    """Stands in for a function. Not itself a function, so that ``class A: clock = time.time`` stays unbound."""

    __slots__ = ("__wrapped__", "call", "fix")

    def __init__(self, original: Callable[..., Any], call: str, fix: str) -> None:
        self.__wrapped__ = original
        self.call = call
        self.fix = fix

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check(self.call, self.fix, sys._getframe(1).f_globals.get("__name__", ""))
        return self.__wrapped__(*args, **kwargs)


def _guard_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for ``Thread.start``, which has to bind."""

    def start(self: threading.Thread) -> Any:
        check("threading.Thread.start", THREAD, sys._getframe(1).f_globals.get("__name__", ""))
        return original(self)

    return start


def _open_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: logging.Logger, *args: Any, **kwargs: Any) -> Any:
        with unfenced():
            return original(self, *args, **kwargs)

    return method


def _fenced_names() -> Iterator[tuple[Any, str, str]]:
    for clock in ("time", "monotonic", "perf_counter"):
        yield time, clock, CLOCK
        yield time, f"{clock}_ns", CLOCK
    yield time, "sleep", SLEEP
    yield os, "urandom", DRAW
    yield uuid, "uuid1", DRAW
    yield uuid, "uuid4", DRAW
    for name in random.__all__:
        if isinstance(getattr(getattr(random, name), "__self__", None), random.Random):
            yield random, name, DRAW


_FENCED_NAMES = tuple(_fenced_names())


def _install() -> None:
    for module, name, fix in _FENCED_NAMES:
        original = getattr(module, name)
        _replace(module, name, original, _Guard(original, f"{module.__name__}.{name}", fix))
    start = threading.Thread.start
    _replace(threading.Thread, "start", start, _guard_start(start))
    for name in ("makeRecord", "handle"):  # not `_log`, which looks for its caller on the stack
        _replace(logging.Logger, name, getattr(logging.Logger, name), _open_gate(getattr(logging.Logger, name)))


def _replace(owner: Any, name: str, original: Any, guard: Any) -> None:
    setattr(owner, name, guard)
    _put_back.append((owner, name, original, guard))


def _restore() -> None:
    while _put_back:
        owner, name, original, guard = _put_back.pop()
        if getattr(owner, name) is guard:  # else somebody patched on top of us, and takes care of it
            setattr(owner, name, original)
