"""One action of the core under way in the simulator, without a task of its own: that would cost ten times as much.

Rules of this room:

1. It begins in a step of its own, after whoever ordered it is done, and answers in another, unless the outcome is there
   at once. A policy may let its steps wait like those of a task (`policies.Stepper`).
2. It answers once, or is given up and never does. Giving up stops the waiting, not what was ordered.
"""

from typing import TYPE_CHECKING, Any

import simpy

from backends.sim.memory import Watch
from backends.sim.policies import Stepper
from core import actions, events
from core.backend import Answer, MayBegin, Timer
from core.units import show_s

if TYPE_CHECKING:
    from backends.sim.backend import SimBackend

OVER = "the run is over"


class Operation(Stepper):
    """Carries `action` out. `may_begin` is asked when it really begins."""

    __slots__ = ("_action", "_answer", "_backend", "_may_begin", "_timer", "_watch")

    def __init__(self, backend: "SimBackend", action: Any, may_begin: MayBegin, answer: Answer, birth: int) -> None:
        self.birth = birth
        self._backend = backend
        self._action = action
        self._may_begin = may_begin
        self._answer: Answer | None = answer
        self._watch: Watch | None = None
        self._timer: Timer | None = None
        """The end of its patience, then its limit."""

    def get_name(self) -> str:
        return type(self._action).__name__

    def give_up(self) -> None:
        """Nobody wants the answer any more."""
        self._answer = None
        self._stop_watching()

    # --- its steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._answer is None or not self._may_begin(self._action):
            return
        outcome = self._order()
        if not isinstance(outcome, simpy.Event):
            self.end(outcome)
        elif outcome.triggered:
            self.end(outcome.value)
        else:
            outcome.callbacks.append(self._ended)

    def end(self, failed: object) -> None:
        """`failed`: None if it is done, else why not."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        number, free = self._action.action, {}
        if self._watch is not None:
            free = self._watch.shown
            self._stop_watching()
        if failed is None:
            answer(self._action, events.ActionDone(action=number, free=free))
        else:
            answer(self._action, events.ActionFailed(action=number, reason=str(failed), free=free))

    def _ended(self, event: simpy.Event) -> None:
        self._backend.soon(self.end, event.value)

    # --- what it is about ----------------------------------------------------------------------------------

    def _order(self) -> simpy.Event | str | None:
        if isinstance(self._action, actions.AwaitMemory) and not self._backend.closed:
            return self._watch_memory(self._action)
        return self._backend.order(self._action)

    def _watch_memory(self, action: actions.AwaitMemory) -> simpy.Event:
        backend = self._backend
        memory = backend.world.memory
        watch = self._watch = memory.watch(memory.on(action.gpus), action.expect or action.need)
        if not watch.seen.triggered:
            self._timer = backend.clock.call_at_ns(backend.clock.now_ns() + action.patience, self._lose_patience)
        return watch.seen

    def _lose_patience(self) -> None:
        """What could already be used is enough from now on, until the limit."""
        assert self._watch is not None, "nothing is watched"
        backend, action, watch = self._backend, self._action, self._watch
        backend.world.memory.relax(watch, action.need)
        if not watch.seen.triggered:
            rest = action.limit - action.patience
            self._timer = backend.clock.call_at_ns(backend.clock.now_ns() + rest, self._run_out)

    def _run_out(self) -> None:
        assert self._watch is not None, "nothing is watched"
        self._backend.world.memory.give_up(self._watch, f"after {show_s(self._action.limit)}")

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._backend.world.memory.unwatch(self._watch)
            if self._timer is not None:
                self._timer.cancel()
