"""Real workers behind the plugin interface, as a driver sees them: trainers, engines (through the desk), and the
scheduler in the control plane's process.

1. Building it joins the cluster (or starts one) and the control plane, so that whatever is refused is refused before
   anything runs; `scenario` has the pipelines under the names they got there.
2. Nothing heavier than Ray is imported in this process.
3. A call to a worker that is gone is a failure with that reason, never an exception of Ray's.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec

from backends.ray_gpu import cluster, wire
from backends.ray_gpu.checkpoints import checkpoint_of, left_of, read_progress
from backends.ray_gpu.checks import check_scenario
from backends.ray_gpu.clock import RealClock
from backends.ray_gpu.devices.budget import cards_of
from backends.ray_gpu.needs import adapted
from backends.ray_gpu.places import DESK, namespace_of, trainer_name
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.record import Record
from backends.ray_gpu.ways import direct_ranks, ways_of
from core import actions, events
from core.backend import Attempt, Emit, Generation, Outcome, Phase
from core.config import Fault, Scenario
from core.errors import OperationFailed
from core.model import Role
from core.service import Listener
from core.topology import check_world

T = TypeVar("T")
SETTLE_NS = 2_000_000_000
"""How long a real world may take to settle before an idle GPU is asked about, and how late telemetry may be."""
OVER = "the backend is closed"


class RayBackend:
    """`RayBackend(scenario, device="cpu", ...)`; `scenarios.backend_options` says what each option is."""

    name = "ray_gpu"
    takes = (
        *("device", "devices", "address", "output", "transport", "verify_weights"),
        *("checkpoint_every", "resume", "workload"),
    )
    """Which command-line options it takes (`scenarios.backend_options`)."""
    settle_ns = SETTLE_NS
    skew_ns = SETTLE_NS

    def __init__(
        self,
        scenario: Scenario,
        *,
        device: str = "cpu",
        devices: Iterable[int | str] | None = None,
        address: str | None = None,
        output: str | Path | None = None,
        verify_weights: bool = False,
        transport: str = "auto",
        heartbeat_s: float = 20.0,
        checkpoint_every: int = 0,
        resume: str | Path | None = None,
    ) -> None:
        check_scenario(scenario, transport)
        cards = cards_of(device, tuple(devices or ()), scenario.cluster, address)
        scenario = adapted(scenario, device, cards.budget)
        check_world(scenario)
        options = wire.ClusterOptions(device=device, devices=cards.indices, heartbeat_s=heartbeat_s)
        common = CrewPlan(
            job=scenario.jobs[0], seed=scenario.seed, device=device, transport=transport,
            verify_weights=verify_weights, caller_path=(os.getcwd(),),
            output="" if output is None else str(output), checkpoint_every=checkpoint_every,
        )  # fmt: skip
        crews = [_going_on(msgspec.structs.replace(common, job=job), resume) for job in scenario.jobs]
        scenario = msgspec.structs.replace(scenario, jobs=tuple(crew.job for crew in crews))
        cluster.connect(address)
        try:
            from backends.ray_gpu.joining import join  # not before Ray's environment is set

            self._joined = join(scenario, options, crews)
        except BaseException:
            cluster.disconnect()
            raise
        self.scenario = self._joined.scenario
        on_gpus = sorted(self._joined.devices.items()) if device == "cuda" else ()
        self.remarks = tuple(f"GPU {gpu} is {what}" for gpu, what in on_gpus)
        """What whoever starts a run should know of the machine."""
        self.clock = RealClock(self._joined.epoch_ns)
        self._jobs = {job.spec.id: job for job in self.scenario.jobs}
        self._borrowers = {
            job.spec.id: direct_ranks(
                ways_of(msgspec.structs.replace(common, job=job), scenario.cluster, options.devices)
            )
            for job in self.scenario.jobs
        }
        """Engines that may take weights from the trainer's memory, by pipeline."""
        self._published: dict[str, int] = {}
        """Version that the trainer offers to them, by pipeline, until it offloads."""
        self._left = False
        self._over: asyncio.Future[None] | None = None
        """Done when no worker will answer any more."""
        try:
            self._record = Record(output, self.scenario)
        except BaseException:
            self._record = Record(None, self.scenario)
            self.abandon()
            raise
        self._handles: dict[tuple[str, str], Any] = {}
        self._decoding: dict[tuple[str, int], int] = {}
        self._calls = 0
        self._taken: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._used: dict[str, int] = {}
        """Batches used so far, by pipeline."""
        self._emit: Emit | None = None
        self._on_kill_client: dict[str, Callable[[], None]] = {}
        self._session: Any = None
        self._harm: list[asyncio.Task[None]] = []
        self._notes: list[asyncio.Task[None]] = []

    # --- life ------------------------------------------------------------------------------------------

    @staticmethod
    def run(main: Callable[[], Awaitable[T]]) -> T:
        """Run `main()` on a fresh asyncio event loop. SIGTERM is taken for Ctrl-C: both clean up."""
        before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
        try:
            return anyio.run(main)  # type: ignore[arg-type]
        finally:
            signal.signal(signal.SIGTERM, before)

    def session(self, listeners: Iterable[Listener], tick: Callable[[int], None]) -> Any:
        """The service, which is in another process."""
        from backends.ray_gpu.session import Session

        self._session = Session(
            self._joined.control, self._joined.run, self.clock, self.scenario.cluster, self.scenario.demand,
            [*listeners, self._record], tick,
        )  # fmt: skip
        self._session.on_tell = self._told
        self._session.busy = lambda: self._calls > 0
        return self._session

    async def open(self, emit: Emit) -> None:
        """Ready to go; from now on faults happen."""
        self._emit = emit
        self._over = asyncio.get_running_loop().create_future()
        self._harm = [asyncio.create_task(self._inject(fault)) for fault in self.scenario.faults]

    async def close(self) -> None:
        """Leave the control plane; take it and the cluster down if nobody else is there. What was asked of workers ends
        as failed: Ray itself tells nobody who still waits when it is left."""
        self._emit = None
        for task in [*self._harm, *self._notes]:
            task.cancel()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        await asyncio.to_thread(self.abandon)

    def abandon(self) -> None:
        """As `close`, without an event loop; twice is once."""
        from backends.ray_gpu.joining import leave

        if not self._left:
            self._left = True
            self._record.close()
            leave(self._joined)
            cluster.disconnect()

    # --- messages and hooks -----------------------------------------------------------------------------

    def carry(self, message: events.Message, deliver: Callable[[events.Message], None]) -> None:
        """The session carries messages itself."""
        deliver(message)

    def on_quiescent(self, callback: Callable[[], None]) -> None:
        self._session.on_quiescent = callback

    def on_kill_client(self, pipeline: str, cancel: Callable[[], None]) -> None:
        self._on_kill_client[pipeline] = cancel

    def on_restart(self, go_down: Callable[[], None], come_back: Callable[[], None]) -> None:
        """A real control plane goes down and comes back by itself."""

    async def perform(self, action: actions.BACKEND | actions.OpenGate) -> Outcome:
        """The scheduler's actions are carried out where it runs."""
        raise OperationFailed("actions are carried out by the control plane")

    def _told(self, event: events.AnyEvent) -> None:
        """What the pipelines say passes by here first: the desk must know it too."""
        match event:
            case events.BatchTaken():
                self._taken[event.pipeline] = (event.batch, event.trajectories)
                self._used[event.pipeline] = event.batch + 1
            case events.TrajectoryDropped():
                self._desk(event.pipeline).dropped.remote(event.batch, event.trajectory)
            case events.BatchClosed() if event.reason != "taken":
                self._closed(event.pipeline, event.batch, event.reason)

    def _closed(self, pipeline: str, batch: int, reason: str) -> None:
        with suppress(OperationFailed):
            figures = self._desk(pipeline).closed.remote(batch)
            if reason == "evaluated":
                self._notes.append(asyncio.create_task(self._evaluated(pipeline, batch, figures)))

    async def _evaluated(self, pipeline: str, batch: int, figures: Any) -> None:
        with suppress(*_ray_errors()):
            self._record.evaluation(pipeline, batch, await figures)

    # --- trainers --------------------------------------------------------------------------------------

    async def phase(self, pipeline: str, role: Role, phase: Phase, epoch: int, version: int = -1) -> None:
        """Run one phase of a worker group. Raises `OperationFailed` with the reason in one line."""
        began = time.monotonic()
        async with self._call():
            if phase == "init":
                if self._left:
                    raise OperationFailed(OVER)
                for known in [key for key in self._handles if key[0] == pipeline]:
                    del self._handles[known]  # of workers before these
                failure = await self._answer(self._session.ask("launch", pipeline, epoch))
                if failure is not None:
                    raise OperationFailed(failure)
                figures: dict[str, float] = {}
            else:
                if phase == "offload":
                    await self._let_borrow(pipeline)
                figures = await self._trainer_phase(pipeline, role, phase, epoch, version)
                if phase == "publish":
                    self._published[pipeline] = version
        self._record.phase(pipeline, phase, version, time.monotonic() - began, figures)

    async def _let_borrow(self, pipeline: str) -> None:
        """Before the trainer offloads what it just published: engines that can take it from there are being synced."""
        version = self._published.pop(pipeline, None)
        if version is not None and self._borrowers[pipeline]:
            await self._answer(self._session.synced(pipeline, version, self._borrowers[pipeline]))

    async def _trainer_phase(
        self, pipeline: str, role: Role, phase: Phase, epoch: int, version: int
    ) -> dict[str, float]:
        job = self._jobs.get(pipeline)
        group = None if job is None else job.spec.group(role)
        if group is None:
            raise OperationFailed(f"{pipeline} has no worker group {role}")
        rows: Any = self._used.get(pipeline, 0) if phase == "publish" else None
        known: dict[str, float] = {}
        try:
            if phase in ("train", "log_probs"):
                if pipeline not in self._taken:
                    raise OperationFailed("no batch was taken yet")
                batch, trajectories = self._taken[pipeline]
                rows, figures = self._desk(pipeline).rows.options(num_returns=2).remote(batch, trajectories)
                known = await self._by(DESK, figures)
            results = await asyncio.gather(
                *(
                    self._by(name, self._handle(pipeline, name).phase.remote(phase, epoch, version, rows))
                    for name in (trainer_name(role, rank) for rank in range(len(group.gpus)))
                )
            )
            if phase == "train":
                self._desk(pipeline).closed.remote(batch)
        except OperationFailed as error:
            raise OperationFailed(f"{pipeline}: {phase} failed: {error}") from error
        return {**known, **results[0]}

    async def _by(self, worker: str, asked: Any) -> Any:
        """What a worker answers. Raises OperationFailed, with its name."""
        try:
            return await self._answer(asked)
        except _ray_errors() as error:
            raise OperationFailed(f"{worker}: {_line(error)}") from error

    async def _answer(self, asked: Awaitable[T]) -> T:
        """What comes of a call. Raises OperationFailed if the backend is closed meanwhile."""
        assert self._over is not None, "the backend is not open"
        call = asyncio.ensure_future(asked)
        try:
            await asyncio.wait((call, self._over), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise OperationFailed(OVER)
            return call.result()
        finally:
            call.cancel()

    def _desk(self, pipeline: str) -> Any:
        return self._handle(pipeline, DESK)

    def _handle(self, pipeline: str, name: str) -> Any:
        """A worker by name. Raises OperationFailed if there is none."""
        if self._left:
            raise OperationFailed(OVER)  # asked now, Ray would start another cluster
        import ray

        key = pipeline, name
        if key not in self._handles:
            try:
                self._handles[key] = ray.get_actor(name, namespace_of(pipeline))
            except ValueError as error:
                raise OperationFailed(f"{pipeline}/{name} is not running") from error
        return self._handles[key]

    # --- rollouts --------------------------------------------------------------------------------------

    def slots(self, pipeline: str) -> int:
        """Requests one engine runs at once; more would queue inside it."""
        return self._jobs[pipeline].costs.engine_slots

    async def generate(self, attempt: Attempt) -> Generation:
        """One trajectory, or the rest of one, on a routable engine. Cancelling it aborts the request."""
        packed = msgspec.msgpack.encode(attempt)
        try:
            desk = self._desk(attempt.pipeline)
        except OperationFailed as gone:
            return Generation(status="failed", reason=str(gone))
        self._decodes(attempt, 1)
        try:
            async with self._call():
                answer = await self._answer(desk.generate.remote(packed))
                return msgspec.msgpack.decode(answer, type=Generation)
        except OperationFailed as error:
            return Generation(status="failed", reason=str(error))
        except _ray_errors() as error:
            return Generation(status="failed", reason=_line(error))
        except asyncio.CancelledError:
            if not self._left:
                desk.cancel.remote(packed)
            raise
        finally:
            self._decodes(attempt, -1)

    def _decodes(self, attempt: Attempt, change: int) -> None:
        """Telemetry: an engine began to decode, or stopped."""
        key = attempt.pipeline, attempt.dp_rank
        before = self._decoding.get(key, 0)
        self._decoding[key] = before + change
        if self._emit is not None and 0 in (before, before + change):
            kind = events.EngineBusy if change > 0 else events.EngineIdle
            self._emit(kind(pipeline=attempt.pipeline, dp_rank=attempt.dp_rank))

    def _call(self) -> "_Call":
        return _Call(self)

    def count(self, change: int) -> None:
        """Calls to workers under way."""
        self._calls += change

    # --- harm ------------------------------------------------------------------------------------------

    async def _inject(self, fault: Fault) -> None:
        await asyncio.sleep(max(0, fault.at - self.clock.now_ns()) / 1e9)
        if self._emit is None:
            return
        match fault.kind:
            case "kill_client":
                self._emit(events.FaultInjected(kind=fault.kind, target=fault.pipeline))
                self._on_kill_client[fault.pipeline]()
            case "restart_control_plane":
                import ray

                self._emit(events.FaultInjected(kind=fault.kind, target=""))
                await self._session.said()
                ray.kill(self._joined.control, no_restart=False)
            case _:
                with suppress(*_ray_errors()):
                    await self._joined.control.inject.remote(fault.kind, fault.pipeline, fault.dp_rank)


def _going_on(crew: CrewPlan, resume: str | Path | None) -> CrewPlan:
    """The crew as it goes on from an earlier run's output folder, if there is one. Raises ConfigError."""
    if resume is None:
        return crew
    folder = checkpoint_of(Path(resume).absolute(), crew.id)
    behind = read_progress(folder)
    return msgspec.structs.replace(crew, job=left_of(crew.job, behind), resume=str(folder), behind=behind)


class _Call:
    """Counts a call to a worker while it is under way."""

    def __init__(self, backend: RayBackend) -> None:
        self._backend = backend

    async def __aenter__(self) -> None:
        self._backend.count(1)

    async def __aexit__(self, *problem: object) -> None:
        self._backend.count(-1)


def _ray_errors() -> tuple[type[BaseException], ...]:
    import ray

    return (ray.exceptions.RayError,)


def _line(error: BaseException) -> str:
    from backends.ray_gpu.failures import first_line

    return first_line(error)
