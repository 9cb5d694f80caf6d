"""One run from the declared world to the verdict: backend, service, pipelines and oracles put together.

The order matters at the end: the verdict is written, the log and the oracles freeze, everybody is cancelled, and
cleanup goes on unlogged until nothing is left.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio

from core.accounting import Accounting
from core.backend import Backend, load_backend
from core.closeness import Wait
from core.config import DriverPolicy, Scenario
from core.driver import Driver
from core.errors import TurnstileError
from core.monitor import Monitor
from core.service import Listener, Service
from core.topology import check_world
from core.trace import Verdict, Violation
from core.waits import explain

Beside = Callable[[Service], Awaitable[None]]
"""Something that runs beside the pipelines, on the same service: the run is over when both are."""


class Result:
    """How a run ended."""

    def __init__(self, scenario: Scenario, backend: str) -> None:
        self.scenario = scenario
        self.backend = backend
        self.outcome = "interrupted"
        """completed, failed, deadlock, starved or interrupted."""
        self.diagnosis: str | None = None
        self.errors: dict[str, Exception | None] = {}
        """How each pipeline ended; None: all its steps are done."""
        self.violations: list[Violation] = []
        self.closest: tuple[Wait, ...] = ()
        """How close it came to its bounds: the closest wait of each rule that has one."""
        self.summary: dict[str, Any] = {}
        """The fields of `--json`."""


def execute(
    scenario: Scenario,
    backend: str | Backend,
    listeners: Iterable[Listener] = (),
    *,
    accounting: Accounting | None = None,
    beside: Beside | None = None,
    check: bool = False,
    **options: Any,
) -> Result:
    """Run a scenario to its end on the backend of that name, built with `options`; or on one that was built already.

    `check`: after every event, compare the scheduler's books with each other from scratch (slow; for tests).

    Raises ConfigError if the world is refused before time 0, InvariantBroken if Turnstile's own books break, and
    KeyboardInterrupt, after cleaning up, if the user stopped it (the result so far is in its `args`).
    """
    made = prepare(scenario, backend, **options) if isinstance(backend, str) else backend
    scenario = scenario_of(made, scenario)
    run = _Run(scenario, made, listeners, accounting or Accounting(scenario), beside, check)
    try:
        made.run(run.main)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(run.finish()) from None
    return run.finish()


def prepare(scenario: Scenario, backend: str, **options: Any) -> Backend:
    """The backend of that name, for this scenario. Raises ConfigError if it refuses."""
    check_world(scenario)
    return load_backend(backend)(scenario, **options)


def scenario_of(backend: Backend, scenario: Scenario) -> Scenario:
    """The scenario as the backend runs it: where others share it, pipelines may have got other ids."""
    return getattr(backend, "scenario", scenario)


def abandon(backend: Backend) -> None:
    """Give up a backend that was prepared and may never have been run; nothing of it is left. Also after a run."""
    give_up = getattr(backend, "abandon", None)
    if give_up is not None:
        give_up()


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        backend: Backend,
        listeners: Iterable[Listener],
        accounting: Accounting,
        beside: Beside | None,
        check: bool,
    ) -> None:
        self._check = check
        self._scenario = scenario
        self._backend = backend
        self._beside = beside
        self._monitor = Monitor(
            scenario.cluster, scenario.demand, scenario.driver, observed=accounting.observed,
            settle_ns=getattr(backend, "settle_ns", 0), skew_ns=getattr(backend, "skew_ns", 0),
            own=[job.spec.id for job in scenario.jobs],
        )  # fmt: skip  # the accounting comes after it, and takes every entry in
        self._accounting = accounting
        self._listeners = [self._monitor, self._accounting, *listeners, self._watch]
        self._result = Result(scenario, backend.name)
        self._scope: anyio.CancelScope
        self._service: Service
        self._driver: Driver
        self._stopped = False
        self._end_ns = 0

    async def main(self) -> None:
        """The whole run. Returns when nothing is left; `finish` has the result."""
        backend = self._backend
        self._scope = anyio.CancelScope()
        self._service = self._make_service()
        await backend.open(self._service.tell)
        try:
            backend.on_quiescent(self._quiescent)
            backend.on_restart(self._service.go_down, self._service.come_back)
            async with self._service:
                await self._drive()
        finally:
            with anyio.CancelScope(shield=True):
                await backend.close()

    def _make_service(self) -> Service:
        """The scheduler's service: in this process, unless the backend hosts it elsewhere."""
        host = getattr(self._backend, "session", None)
        if host is not None:
            return host(self._listeners, self._tick)
        return Service(
            self._backend,
            self._scenario.cluster,
            self._scenario.demand,
            self._listeners,
            journal=self._needs_journal(),
            check=self._check,
        )

    def _tick(self, now_ns: int) -> None:
        """Real time passes also while nothing happens."""
        self._monitor.tick(now_ns)
        self._watch(0, now_ns, -1, None)

    async def _drive(self) -> None:
        self._driver = Driver(self._scenario, self._service, self._backend)
        for job in self._scenario.jobs:
            self._backend.on_kill_client(job.spec.id, self._vanisher(job.spec.id))
        with self._scope:
            if self._beside is None:
                error = await self._pipelines()
            else:
                async with anyio.create_task_group() as others:
                    others.start_soon(self._beside, self._service)
                    error = await self._pipelines()
            await self._heard_out()
            self._end(error)

    async def _heard_out(self) -> None:
        """Where the service is in another process, its log may still be on its way here."""
        said = getattr(self._service, "said", None)
        if said is not None:
            await said()

    async def _pipelines(self) -> TurnstileError | None:
        """Run them all; under `fail_fast` the error that ended them."""
        try:
            self._result.errors = await self._driver.run()
        except TurnstileError as first:
            if self._scenario.driver is not DriverPolicy.FAIL_FAST:
                raise
            return first
        return None

    def _vanisher(self, pipeline: str) -> Callable[[], None]:
        return lambda: self._driver.vanish(pipeline)

    def _needs_journal(self) -> bool:
        return any(fault.kind == "restart_control_plane" for fault in self._scenario.faults)

    # --- verdicts --------------------------------------------------------------------------------------

    def _watch(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        """The last listener: stops the run at the monitor's verdict."""
        verdict = self._monitor.verdict
        if verdict is not None and not self._stopped:
            self._stop(verdict)

    def _quiescent(self) -> None:
        """Nothing can happen any more, and the run is not over."""
        if not self._stopped:
            self._monitor.on_quiescent(explain(self._service.state))
            self._watch(0, 0, 0, None)

    def _stop(self, verdict: Verdict) -> None:
        self._stopped = True
        self._end_ns = self._backend.clock.now_ns()
        self._result.outcome = verdict.outcome
        told = explain(self._service.state)
        self._result.diagnosis = verdict.text if verdict.text == told else f"{verdict.text}\n{told}"
        self._service.conclude(verdict)
        self._scope.cancel()

    def _end(self, error: TurnstileError | None) -> None:
        """Everyone ended by themselves."""
        if self._stopped:
            return
        self._stopped = True
        self._end_ns = self._backend.clock.now_ns()
        failed = error is not None or any(self._driver.outcomes.values())
        self._result.errors = self._driver.outcomes
        self._result.outcome = "failed" if failed else "completed"
        self._monitor.finish(self._result.outcome)
        self._service.conclude(Verdict(outcome=self._result.outcome))

    def finish(self) -> Result:
        """The result, also of a run that was interrupted."""
        result = self._result
        if not self._stopped and hasattr(self._backend, "clock"):
            self._end_ns = self._backend.clock.now_ns()
        result.violations = self._monitor.violations
        result.closest = self._monitor.closest()
        result.summary = {
            "scenario": self._scenario.name,
            "backend": result.backend,
            "demand": str(self._scenario.demand),
            "seed": self._scenario.seed,
            "outcome": result.outcome,
            **self._figures(),
            "violations": [
                {"rule": v.rule, "at_s": v.at_ns / 1e9, "detail": v.detail} for v in self._monitor.violations
            ],
            "diagnosis": result.diagnosis,
            "closest": [wait.summary() for wait in result.closest],
        }
        return result

    def _figures(self) -> dict[str, Any]:
        """Of this run: a shared control plane's log tells of other runs' pipelines, too."""
        figures = self._accounting.figures(self._end_ns)
        own = {job.spec.id: None for job in self._scenario.jobs}
        return {
            name: [one for one in value if one["id"] in own] if name == "pipelines" else value
            for name, value in figures.items()
        }
