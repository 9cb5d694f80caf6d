"""Who waits: the one choice of the simulator, written as *holds*.

Whenever several things could run in one instant, the loop asks its policy how many of the task steps at the head
of the queue shall wait. Rules of this room:

1. A step may wait, never jump. ``0`` is FIFO; ``v`` holds the first ``v`` steps until the rest of the instant is
   idle, then they run in their old order, before the clock moves. So no policy can starve a task.
2. Plain callbacks are never held or overtaken by a step: anyio's cancellation relies on their order.
3. A policy sees labels and birth numbers only, nothing that differs between two processes.
4. Every schedule, however it was found, replays as ``Holds({decision: holds})``.

The policies come first, then the ``Chooser`` that asks one on behalf of the loop.
"""

import asyncio
import random
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from backends.sim.calendar import SimEnv

# More candidates than this make a choice slow and tell an explorer nothing new.
CANDIDATES_MAX = 64
# Rounds of callbacks without any task step after which held steps run: anyio re-arms its cancellation callback until
# every task is done, so with a cancelled task on hold the queue would never get empty.
IDLE_ROUNDS = 3


class Choice(NamedTuple):
    """One decision to make: the task steps at the head of the queue, and what could run instead of all of them."""

    index: int  # decisions made before this one
    at_ns: int
    births: tuple[int, ...]  # birth number of each step's task
    labels: tuple[str, ...]  # their names; one more than ``births`` if something else could run
    most: int  # the largest number of holds allowed


class Decision(NamedTuple):
    """A choice that was made, as it is recorded."""

    index: int
    at_ns: int
    labels: tuple[str, ...]
    holds: int


class Policy(Protocol):
    """Answers each choice with the number of leading steps to hold; the loop caps it at ``choice.most``."""

    def holds(self, choice: Choice) -> int: ...


class Fifo:
    """The schedule users see. The loop does not even ask it."""

    def holds(self, choice: Choice) -> int:
        return 0


class Holds:
    """A schedule written down: ``{decision index: holds}``; every decision not named is FIFO."""

    def __init__(self, script: Mapping[int, int]) -> None:
        self.script = dict(script)

    def holds(self, choice: Choice) -> int:
        return self.script.get(choice.index, 0)


class Walk:
    """A seeded random walk: uniform over what could run, or, given ``p``, something other than FIFO that often."""

    def __init__(self, seed: int | str, p: float | None = None) -> None:
        # A stream of its own: a draw added elsewhere must not shift the schedule.
        self._draw = random.Random(f"{seed}:sched").random
        self._p = p

    def holds(self, choice: Choice) -> int:
        if self._p is None:
            return int(self._draw() * (choice.most + 1))
        if self._draw() >= self._p:
            return 0
        return 1 + int(self._draw() * choice.most)


class Stepper:
    """Takes steps like a task without being one: each of its methods that is given to the loop is a step. ``birth`` is
    its place among the tasks."""

    __slots__ = ("birth",)
    birth: int

    def get_name(self) -> str:
        raise NotImplementedError


_NAMED = (asyncio.Task, Stepper)


def is_step(handle: asyncio.Handle) -> bool:
    """Whether this handle resumes a task: its first step, a continuation after ``sleep(0)``, or a wake-up; or whether
    it is a step of a ``Stepper``.

    In C a wake-up is a builtin method called ``task_wakeup`` and the other steps are objects without any name; all of
    them are bound to their task.
    """
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(callback, "__name__", "task_wakeup") == "task_wakeup"
    return isinstance(owner, Stepper)


def label(handle: asyncio.Handle) -> str:
    """What a handle is called in records: its task's name, else its function's."""
    callback: Any = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, _NAMED):
        return owner.get_name()
    if isinstance(callback, partial):
        callback = callback.func
    return getattr(callback, "__qualname__", type(callback).__name__)


class Chooser:
    """Takes handles off the ready queue in the order the policy wants."""

    def __init__(self, policy: Policy, ready: deque[asyncio.Handle], env: SimEnv, decisions: list[Decision]) -> None:
        self.held: list[asyncio.Handle] = []
        self._policy = policy
        self._ready = ready
        self._env = env
        self._decisions = decisions
        self._quiet = 0  # callbacks run since the last task step
        self._forced = False  # the next step runs without being asked about: it was held long enough

    def take(self) -> asyncio.Handle | None:
        """The next handle to run, or None when it is the calendar's turn."""
        ready = self._ready
        while True:
            if not ready:
                self._quiet = 0
                if not self.held or self._env.due():
                    return None
                self.release()
            if len(ready) == 1 and not self.held and not self._env.due():
                return self._only_one(ready.popleft())
            steps = self._leading_steps()
            if not steps:
                self._end_spin()
                return ready.popleft()
            held_now = 0 if self._forced else self._ask(steps)
            for _ in range(held_now):
                self.held.append(ready.popleft())
            if ready:
                self._quiet = 0
                self._forced = False
                return ready.popleft()

    def release(self) -> None:
        """Put what is held back into the queue, in its old order."""
        self._ready.extend(self.held)
        self.held.clear()

    def _only_one(self, handle: asyncio.Handle) -> asyncio.Handle:
        """Nothing else could run, so there is nothing to choose: what the rest of `take` would come to."""
        if (self._quiet or self._forced) and is_step(handle):
            self._quiet = 0
            self._forced = False
        return handle

    def _leading_steps(self) -> list[asyncio.Handle]:
        ready = self._ready
        steps: list[asyncio.Handle] = []
        # By index: a signal handler may append while we look.
        for i in range(min(len(ready), CANDIDATES_MAX)):
            handle = ready[i]
            if not is_step(handle):
                break
            steps.append(handle)
        return steps

    def _ask(self, steps: list[asyncio.Handle]) -> int:
        other = self._instead(len(steps))
        most = len(steps) - (other is None)
        if most == 0:
            return 0
        labels = tuple([label(step) for step in steps])
        if other is not None:
            labels = (*labels, other)
        births = tuple([step._callback.__self__.birth for step in steps])
        choice = Choice(len(self._decisions), self._env._now, births, labels, most)
        holds = min(max(self._policy.holds(choice), 0), most)
        self._decisions.append(Decision(choice.index, choice.at_ns, labels, holds))
        return holds

    def _instead(self, n_steps: int) -> str | None:
        """What would run if all leading steps waited."""
        if len(self._ready) > n_steps:
            return label(self._ready[n_steps])
        if self._env.due():
            return "(calendar)"
        return "(held)" if self.held else None

    def _end_spin(self) -> None:
        """A callback is about to run: when only callbacks did for some rounds, end the hold."""
        if not self.held:
            return
        self._quiet += 1
        if self._quiet > IDLE_ROUNDS * len(self._ready):
            self._quiet = 0
            self._forced = True
            self.release()
