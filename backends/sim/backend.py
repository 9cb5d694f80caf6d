"""The simulator behind the plugin interface: a world of GPUs, engines and trainers on the calendar of its event loop.

Rules of this room:

1. It only works under `backends.sim.loop` (`run_sim`), whose SimPy environment it shares. Hardware and processes are
   SimPy's; the service and the pipelines are asyncio's; the two meet in `loop.until` and in the future of a request.
2. Whoever stops waiting for an action or a phase does not stop it, as with a real worker that has its order already.
   Cancelling `generate` does: it aborts the request.
3. Nothing here depends on real time, addresses or hashes. Costs are the scenario's, draws are keyed (`chance`), the
   rest follows.

What the scenario does not say is in `world.Options`: `SimBackend(scenario, release_lag=..., heartbeat=...)`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import simpy

from backends.sim import faults
from backends.sim.calendar import Bell
from backends.sim.crew import Crew
from backends.sim.faults import Faults
from backends.sim.loop import run_sim
from backends.sim.operation import OVER, Operation
from backends.sim.policies import Policy
from backends.sim.wire import Wire
from backends.sim.world import Options, World
from core import actions, events
from core.backend import Answer, Attempt, Clock, Emit, Generation, MayBegin, Outcome, Phase
from core.config import Scenario
from core.errors import OperationFailed, SimulationError
from core.model import Role

T = TypeVar("T")


class SimBackend:
    """A simulated cluster and the workers of every pipeline of `scenario`."""

    name = "sim"

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        faults.check(scenario)
        self._scenario = scenario
        self._options = Options(**options)
        self._emit: Emit | None = None
        self._crews: dict[str, Crew] = {}
        self.clock: Clock
        """The loop's; there from `open` on."""

    # --- life ----------------------------------------------------------------------------------------------

    @staticmethod
    def run(main: Callable[[], Awaitable[T]], *, policy: Policy | None = None) -> T:
        """Run `main()` on the event loop this backend needs, a fresh one. `policy` chooses the schedule; None: FIFO."""
        return run_sim(main, policy=policy)

    async def open(self, emit: Emit) -> None:
        """Build the world at this instant and put its faults on the calendar."""
        loop: Any = asyncio.get_running_loop()
        if not hasattr(loop, "env"):
            raise SimulationError("the simulator runs on virtual time only: start it with backends.sim.loop.run_sim()")
        self._loop = loop
        self.clock = loop
        self._emit = emit
        self._world = World(loop.env, self._scenario, self._options, self._tell, loop.call_at_ns)
        self._crews = {job.spec.id: Crew(self._world, job) for job in self._scenario.jobs}
        self._wire = Wire(self._world)
        self._faults = Faults(self._world, self._crews, self._wire)
        self._faults.schedule(self._scenario.faults)

    async def close(self) -> None:
        """Kill everything, at once and silently. What was asked of it ends as failed."""
        if self._emit is None:
            return
        self._emit = None
        self._faults.cancel()
        self._wire.deaf = True
        for crew in self._crews.values():
            crew.stop(OVER)
        self._world.memory.clear(OVER)

    @property
    def world(self) -> World:
        """For tests and reports: memory, links, armed faults."""
        return self._world

    def crew(self, pipeline: str) -> Crew:
        return self._crews[pipeline]

    def _tell(self, event: events.AnyEvent) -> None:
        if self._emit is not None:
            self._emit(event)

    # --- messages and hooks --------------------------------------------------------------------------------

    def carry(self, message: events.Message, deliver: Callable[[events.Message], None]) -> None:
        """Take a client's message to the service: in this call, unless a fault says otherwise."""
        self._wire.carry(message, deliver)

    def on_kill_client(self, pipeline: str, cancel: Callable[[], None]) -> None:
        """Let `kill_client` call `cancel`, which makes the pipeline's task end. From then on its messages are lost, and
        `ClientLost` follows after the heartbeat limit."""
        self._faults.on_kill_client[pipeline] = cancel

    def on_restart(self, go_down: Callable[[], None], come_back: Callable[[], None]) -> None:
        """Let `restart_control_plane` call `go_down` when its outage begins and `come_back` when it is over. In between
        all messages are lost."""
        self._faults.on_restart = (go_down, come_back)

    def on_quiescent(self, callback: Callable[[], None]) -> None:
        """Let the loop call back when nothing but daemon entries can happen any more. To be called after `open`."""
        self._loop.on_quiescent = callback

    def command_delay(self, pipeline: str) -> int:
        """ns from a command to a pipeline's client until it is taken."""
        crew = self._crews.get(pipeline)
        return 0 if crew is None else crew.command_delay()

    # --- engines -------------------------------------------------------------------------------------------

    async def perform(self, action: actions.BACKEND | actions.OpenGate) -> Outcome:
        """Carry out one action of the core."""
        outcome = self._loop.create_future()
        give_up = self.begin(action, lambda _: True, lambda _, answer: outcome.set_result(answer))
        try:
            return await outcome
        finally:
            give_up()

    def begin(
        self, action: actions.BACKEND | actions.OpenGate, may_begin: MayBegin, answer: Answer
    ) -> Callable[[], None]:
        """The same without anybody waiting."""
        loop = self._loop
        loop.births += 1
        operation = Operation(self, action, may_begin, answer, loop.births)
        loop.call_soon(operation.begin)
        return operation.give_up

    @property
    def closed(self) -> bool:
        return self._emit is None

    def soon(self, step: Callable[..., None], *args: Any) -> None:
        """Call `step(*args)` in a later step of the loop."""
        self._loop.call_soon(step, *args)

    def order(self, action: actions.EngineAction | actions.StopPipeline) -> simpy.Event | str | None:
        """Give an order to the workers: what to wait for, or the outcome at once (None: done)."""
        if self.closed:
            return OVER
        crew = self._crews.get(action.pipeline)
        if isinstance(action, actions.StopPipeline):
            return self._stop(crew, action)
        engine = None if crew is None else crew.engine(action.dp_rank)
        if crew is None or engine is None:
            return f"there is no engine {action.pipeline}/{action.dp_rank}"
        if not crew.started:
            return f"{action.pipeline} has no workers"
        return engine.obey(action)

    def _stop(self, crew: Crew | None, action: actions.StopPipeline) -> str | None:
        if crew is None:
            return f"there is no pipeline {action.pipeline}"
        crew.stop(action.reason)
        return None

    async def _end_of(self, event: simpy.Event | str | None) -> str | None:
        """Wait for an operation, unless the outcome is here already."""
        if not isinstance(event, simpy.Event):
            return event
        outcome = event.value if event.triggered else await self._loop.until(event)
        return None if outcome is None else str(outcome)

    # --- trainers ------------------------------------------------------------------------------------------

    async def phase(self, pipeline: str, role: Role, phase: Phase, epoch: int, version: int = -1) -> None:
        """Run one phase of a worker group. Raises `OperationFailed` with the reason in one line."""
        crew = self._crews.get(pipeline)
        if crew is None or self._emit is None:
            raise OperationFailed(OVER if crew else f"there is no pipeline {pipeline}")
        failed = await self._end_of(crew.phase(role, phase, epoch, version))
        if failed is not None:
            raise OperationFailed(failed)

    # --- rollouts ------------------------------------------------------------------------------------------

    bell = Bell

    def slots(self, pipeline: str) -> int:
        """Requests one engine runs at once; more would queue inside it."""
        return self._crews[pipeline].job.costs.engine_slots

    async def generate(self, attempt: Attempt) -> Generation:
        """One trajectory, or the rest of one. Costs one calendar entry and one future."""
        crew = self._crews.get(attempt.pipeline)
        engine = None if crew is None else crew.engine(attempt.dp_rank)
        if crew is None or engine is None:
            return Generation(status="failed", reason=f"there is no engine {attempt.pipeline}/{attempt.dp_rank}")
        if not engine.gate:
            return Generation(status="aborted", segments=attempt.prefix, reason=engine.why_closed())
        request = engine.submit(attempt.prefix, crew.length(attempt), self._loop.create_future())
        try:
            return await request.future
        except asyncio.CancelledError:
            engine.withdraw(request)
            raise
