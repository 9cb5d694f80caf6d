"""Runs pipelines side by side: when each starts, and what one's failure means for the others.

Rules of this room:

1. `isolate`: an error belongs to the pipeline that made it; the others go on. `fail_fast`: the peers are cancelled in
   the order of the scenario, settle (their cleanup is part of that), and then the *first* error is raised, bare.
2. An error is first by when it happened, not by whose cleanup was done first.
3. A bug is an error like any other here: it is that pipeline's, with its type and message. It is never dropped.
4. Cancellation from outside cancels everybody, waits for their cleanup and goes on outwards.

Initialisations run one after another because the scheduler grants one at a time, in the order asked: a lock here would
only hide the waiting from whoever asks why.
"""

from collections.abc import Awaitable, Callable

import anyio

from core import events
from core.backend import Backend
from core.config import DriverPolicy, Job, Scenario, Trigger
from core.errors import PipelineFailed
from core.pipeline import CANCELLED, Pipeline, describe, wait_until
from core.port import Port
from core.service import Service


class Driver:
    """The pipelines of one scenario. `outcomes` fills as they end: the error of each, or None."""

    def __init__(self, scenario: Scenario, service: Service, backend: Backend) -> None:
        self._scenario = scenario
        self._service = service
        self._backend = backend
        self._ended = {job.spec.id: anyio.Event() for job in scenario.jobs}
        self._scopes = {job.spec.id: anyio.CancelScope() for job in scenario.jobs}
        self._pipelines: dict[str, Pipeline] = {}
        self._vanished: dict[str, None] = {}
        self._first: Exception | None = None
        self.outcomes: dict[str, Exception | None] = {}

    async def run(self) -> dict[str, Exception | None]:
        """Run every job to its end. Under `fail_fast` raises the first error, once everyone has settled."""
        async with anyio.create_task_group() as tasks:
            for job in self._scenario.jobs:
                tasks.start_soon(self._run_one, job, name=job.spec.id)
        if self._first is not None and self._scenario.driver is DriverPolicy.FAIL_FAST:
            raise self._first
        return self.outcomes

    def vanish(self, pipeline: str) -> None:
        """The pipeline's client process dies without a word; the scheduler will notice its silence."""
        self._vanished[pipeline] = None
        if pipeline in self._pipelines:
            self._pipelines[pipeline].vanish()
        self._scopes[pipeline].cancel()

    async def _run_one(self, job: Job) -> None:
        """One pipeline from its start to its end, whatever that is; raises nothing but cancellation."""
        name = job.spec.id
        port = self._service.connect(name)
        said: str | None = CANCELLED
        try:
            error = await self._outcome(job, port)
            self.outcomes[name] = error
            said = describe(error)
        finally:
            self._ended[name].set()
            port.tell(events.PipelineEnded(pipeline=name, error=said))

    async def _outcome(self, job: Job, port: Port) -> Exception | None:
        name = job.spec.id
        with self._scopes[name] as scope:
            try:
                await self._until_start(job)
                self._pipelines[name] = self._pipeline(job, port)
                await self._pipelines[name].run()
            except Exception as error:
                self._note(name, error)
                return error
        return self._why_cancelled(name) if scope.cancelled_caught else None

    def _why_cancelled(self, name: str) -> Exception:
        if name not in self._vanished:
            return PipelineFailed(name, f"{CANCELLED} because another pipeline failed first: {describe(self._first)}")
        error = PipelineFailed(name, "its client vanished")
        self._note(name, error)
        return error

    def _pipeline(self, job: Job, port: Port) -> Pipeline:
        trigger = job.dispatch_after
        return Pipeline(
            job,
            port,
            self._backend,
            may_dispatch=None if trigger is None else lambda: self._happened_or_ended(trigger),
            on_failure=lambda error: self._note(job.spec.id, error),
        )

    # --- starting -------------------------------------------------------------------------------------

    async def _until_start(self, job: Job) -> None:
        clock = self._backend.clock
        if job.start_at > clock.now_ns():
            await wait_until(clock, job.start_at)
        if job.start_after is not None:
            await self._happened_or_ended(job.start_after)

    async def _happened_or_ended(self, trigger: Trigger) -> None:
        """Wait for the trigger, or until the pipeline it names is over: then it will never happen."""
        async with anyio.create_task_group() as either:

            async def first(wait: Callable[..., Awaitable[None]], *args: object) -> None:
                await wait(*args)
                either.cancel_scope.cancel()

            either.start_soon(first, self._service.happened, trigger)
            if trigger.pipeline in self._ended:
                either.start_soon(first, self._ended[trigger.pipeline].wait)

    # --- failing --------------------------------------------------------------------------------------

    def _note(self, name: str, error: Exception) -> None:
        """An error was seen for the first time or again; only the very first one matters here."""
        if self._first is not None:
            return
        self._first = error
        if self._scenario.driver is DriverPolicy.FAIL_FAST:
            for peer, scope in self._scopes.items():
                if peer != name:
                    scope.cancel()
