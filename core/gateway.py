"""One pipeline's way to its engines: which trajectory runs where, and what happens when it does not come back.

Rules of this room:

1. An attempt starts only on an engine whose gate is open and whose version is fresh enough for its batch, so nothing
   is stale by construction: a training batch that will be taken at version V accepts engines at V - k or newer. An
   evaluation runs on exactly one version.
2. Every trajectory of a batch ends once: accepted, dropped with a reason, or still queued. Attempts are numbered; only
   the newest attempt of a trajectory counts, whatever an older one says later.
3. A preempted attempt costs nothing but time. One that fails or exceeds the pipeline's limit counts; after
   `max_attempts` of those the trajectory is given up and its batch closes short.
4. The hot path is the trajectory: tasks are reused, and one timer serves all limits, for they expire in the order in
   which attempts started.

What does *not* belong here: leases, training, weights, and the choice of which engines are awake.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

import anyio
from anyio.abc import TaskGroup

from core import events
from core.backend import Attempt, Backend, Bell, Generation, Timer
from core.config import Job
from core.errors import Conflict, PipelineFailed, WorldError
from core.model import BatchKind, Partial
from core.port import Port
from core.samples import RolloutBatch, Sample, Trajectory
from core.units import NS_PER_S, show_s

# After two failures in a row an engine gets nothing new for this long, so that an engine which fails at once cannot
# burn every attempt of every trajectory before the scheduler has heard of its death (one message away).
REST_NS = 5 * NS_PER_S
FAILURES_IN_A_ROW = 2


Reward = Callable[[Sample], Awaitable[None]]


class _Engine:
    """What the gateway knows of an engine. `opening` tells one open gate from the next."""

    __slots__ = (
        "answered_ns",
        "epoch",
        "failures",
        "in_flight",
        "open",
        "opening",
        "rank",
        "resting",
        "unanswered",
        "version",
    )

    def __init__(self, rank: int, epoch: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.version = -1
        self.open = False
        self.opening = 0
        self.in_flight = 0
        self.answered_ns = -1
        """When it last completed an attempt."""
        self.failures = 0
        """Attempts failed in a row since the gate opened."""
        self.unanswered: dict[Trajectory, None] = {}
        """Trajectories during whose last attempt here, past its limit, the engine answered nobody."""
        self.resting = False


class _Flight:
    """One attempt under way."""

    __slots__ = ("attempt", "deadline", "engine", "landed", "opening", "prefix", "trajectory", "version", "worker")

    def __init__(self, trajectory: Trajectory, engine: _Engine, prefix: tuple[tuple[int, int], ...], deadline: int):
        self.trajectory = trajectory
        self.attempt = trajectory.attempt
        self.engine = engine
        self.opening = engine.opening
        self.version = engine.version
        self.prefix = prefix
        self.deadline = deadline
        self.landed = False
        self.worker: _Worker | None = None

    @property
    def counts(self) -> bool:
        """False once another attempt took its place, or the trajectory is over."""
        return self.attempt == self.trajectory.attempt


class _Worker:
    """A task that flies one attempt after another, parked on its event in between. Cancelling its scope aborts the
    attempt under way and retires the worker: a scope for each attempt would cost more than all the rest."""

    __slots__ = ("flight", "retired", "scope", "wake")

    def __init__(self) -> None:
        self.flight: _Flight | None = None
        self.retired = False
        self.scope = anyio.CancelScope()
        self.wake: Bell | None = None

    def take(self, flight: _Flight) -> None:
        self.flight = flight
        flight.worker = self
        if self.wake is not None:
            self.wake.set()

    def retire(self) -> None:
        self.retired = True
        self.scope.cancel()


class Gateway:
    """Sends a pipeline's trajectories to its routable engines. Used as an async context manager; leaving it aborts
    whatever is in flight.

    Load is balanced by least in flight, ties to the lowest rank, at most `slots` an engine; the rest queues here, also
    while there is no engine at all. Training and evaluation take turns where both could start.
    """

    def __init__(self, job: Job, port: Port, backend: Backend, reward: Reward | None = None) -> None:
        self._job = job
        self._pipeline = job.spec.id
        self._port = port
        self._backend = backend
        self._clock = backend.clock
        self._reward = reward
        self._tasks: TaskGroup | None = None
        self._bell: Callable[[], Bell] = getattr(backend, "bell", anyio.Event)
        self._idle: list[_Worker] = []
        self._slots = 0
        self._engines: list[_Engine] = []
        self._training: list[RolloutBatch] = []
        self._evaluations: list[RolloutBatch] = []
        self._last_kind = BatchKind.EVAL
        self._held_back = False
        self._latest = -1
        self._being_trained = 0
        self._limits: deque[_Flight] = deque()
        self._limit_timer: Timer | None = None
        self._rest_timers: dict[_Engine, Timer] = {}

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *problem: object) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None, "left twice"
        self._cancel_timers()
        tasks.cancel_scope.cancel()
        return await tasks.__aexit__(*problem)  # type: ignore[arg-type]

    # --- gates: called by the service -----------------------------------------------------------------

    def open_gate(self, dp_rank: int, version: int, epoch: int) -> None:
        """The engine serves `version` from now on. A new epoch is a new engine: what the old one still had in flight
        takes none of its slots."""
        self._slots = self._backend.slots(self._pipeline)
        engine = self._engine(dp_rank)
        if engine is None or engine.epoch != epoch:
            engine = self._replace(engine, _Engine(dp_rank, epoch))
        engine.version = version
        engine.open = True
        engine.opening += 1
        engine.failures = 0
        engine.unanswered.clear()
        self._wake_up(engine)
        self.dispatch()

    def close_gate(self, dp_rank: int) -> None:
        """Nothing more goes to the engine. What is in flight there ends by the backend's doing."""
        engine = self._engine(dp_rank)
        if engine is not None:
            engine.open = False

    # --- what the pipeline says -----------------------------------------------------------------------

    def hold_back(self) -> None:
        """Dispatch nothing until `let_go`."""
        self._held_back = True

    def let_go(self) -> None:
        self._held_back = False
        self.dispatch()

    def published(self, version: int) -> None:
        """Version `version` is in the cache; the step that made it is over."""
        self._latest = version
        self.step_ended()

    def step_ended(self) -> None:
        """No batch is being trained any more."""
        self._being_trained = 0
        self.dispatch()

    def open_batch(self, number: int, target: int, kind: BatchKind = BatchKind.TRAIN) -> RolloutBatch:
        """Collect `target` trajectories, at once as far as engines allow."""
        batch = RolloutBatch(number, target, kind)
        (self._training if kind is BatchKind.TRAIN else self._evaluations).append(batch)
        self.dispatch()
        return batch

    async def filled(self, batch: RolloutBatch) -> None:
        """Wait until the batch is full. Raises PipelineFailed if every one of its trajectories was given up."""
        await batch.filled()
        if batch.failure is not None:
            raise PipelineFailed(self._pipeline, f"no trajectory of batch {batch.number} came back: {batch.failure}")

    async def take(self, batch: RolloutBatch, version: int) -> list[Sample]:
        """Wait for a full batch in which nothing is too stale for a trainer at `version`, and hand it over: from here
        on it is being trained. Stale samples are dropped and asked for again."""
        await self.filled(batch)
        while stale := [s for s in batch.samples if version - s.version > self._job.spec.staleness]:
            self._drop(batch, stale, "stale")
            self.dispatch()
            await self.filled(batch)
        self._being_trained = 1
        return self.close_batch(batch)

    def close_batch(self, batch: RolloutBatch) -> list[Sample]:
        """Forget the batch; attempts still in flight for it no longer count."""
        kept = self._training if batch.kind is BatchKind.TRAIN else self._evaluations
        if batch not in kept:
            raise Conflict(f"{self._pipeline}: batch {batch.number} is not open")
        kept.remove(batch)
        return batch.close()

    # --- which trajectory goes where ------------------------------------------------------------------

    def dispatch(self) -> None:
        """Start whatever can start. Costs one look at the engines when nothing can."""
        if self._tasks is None or self._held_back:
            return
        while (found := self._next()) is not None:
            self._launch(*found)

    def _next(self) -> tuple[RolloutBatch, _Engine] | None:
        """The batch whose turn it is and the engine for it: oldest batch first, evaluation and training by turns."""
        if self._evaluations and self._last_kind is BatchKind.TRAIN:
            return self._next_evaluation() or self._next_training()
        return self._next_training() or (self._next_evaluation() if self._evaluations else None)

    def _next_training(self) -> tuple[RolloutBatch, _Engine] | None:
        # The batch in place i is taken i versions (and the step under way) from now.
        oldest = self._latest + self._being_trained - self._job.spec.staleness
        for batch in self._training:
            trajectory = batch.waiting
            if trajectory is not None:
                engine = self._least_loaded(oldest, None, trajectory.avoid)
                if engine is not None:
                    return batch, engine
            oldest += 1
        return None

    def _next_evaluation(self) -> tuple[RolloutBatch, _Engine] | None:
        oldest = self._latest - self._job.spec.staleness
        for batch in self._evaluations:
            trajectory = batch.waiting
            if trajectory is not None:
                self._follow_version(batch)
                engine = self._least_loaded(oldest, batch.version, trajectory.avoid)
                if engine is not None:
                    return batch, engine
        return None

    def _least_loaded(self, oldest: int, exactly: int | None, avoid: int) -> _Engine | None:
        """The engine with the least in flight among those that may serve; `avoid` only if there is no other."""
        best, best_load = None, 0
        slots = self._slots
        for engine in self._engines:
            load = engine.in_flight
            if load >= slots or not engine.open or engine.resting or engine.version < oldest:
                continue
            if exactly is not None and engine.version != exactly:
                continue
            if engine.rank == avoid:
                load += slots
            if best is None or load < best_load:
                best, best_load = engine, load
        return best

    def _follow_version(self, batch: RolloutBatch) -> None:
        """An evaluation whose version is gone starts over on a newer one: an engine syncs to the latest only, so no
        gate will open at the old version again."""
        versions = [engine.version for engine in self._engines if engine.open]
        if batch.version is None or batch.version in versions or max(versions, default=-1) <= batch.version:
            return
        reason = f"evaluation starts over: no engine serves version {batch.version} any more"
        batch.recall()
        batch.version = None
        if batch.samples:
            self._drop(batch, list(batch.samples), reason)

    def _launch(self, batch: RolloutBatch, engine: _Engine) -> None:
        trajectory = batch.start()
        self._last_kind = batch.kind
        if batch.kind is BatchKind.EVAL:
            batch.version = engine.version
        engine.in_flight += 1
        limit = self._job.reissue_after
        prefix = self._usable_prefix(trajectory) if trajectory.prefix else ()
        flight = _Flight(trajectory, engine, prefix, self._clock.now_ns() + limit)
        if limit:
            self._watch(flight)
        self._worker().take(flight)

    def _worker(self) -> _Worker:
        if self._idle:
            return self._idle.pop()
        assert self._tasks is not None
        worker = _Worker()
        self._tasks.start_soon(self._work, worker, name="rollout")
        return worker

    def _usable_prefix(self, trajectory: Trajectory) -> tuple[tuple[int, int], ...]:
        """What was generated so far, unless its oldest segment would break the batch's rule on versions."""
        batch, oldest = trajectory.batch, trajectory.prefix[0][0]
        if batch.kind is BatchKind.EVAL:
            return trajectory.prefix if all(version == batch.version for version, _ in trajectory.prefix) else ()
        taken_at = self._latest + self._being_trained + self._training.index(batch)
        return trajectory.prefix if taken_at - oldest <= self._job.spec.staleness else ()

    # --- attempts -------------------------------------------------------------------------------------

    async def _work(self, worker: _Worker) -> None:
        with worker.scope:
            while not worker.retired:
                if worker.flight is None:
                    worker.wake = self._bell()
                    await worker.wake.wait()
                flight, worker.flight = worker.flight, None
                assert flight is not None, "woken without a flight"
                await self._fly(flight)
                if not worker.retired:
                    self._idle.append(worker)
                    self.dispatch()
        self.dispatch()

    async def _fly(self, flight: _Flight) -> None:
        try:
            generation = await self._backend.generate(self._attempt(flight))
        except WorldError as problem:
            generation = Generation(status="failed", reason=str(problem))
        finally:
            self._land(flight)
        self._judge(flight, generation)
        if not flight.counts:
            return  # late: another attempt took its place
        if generation.status == "completed":
            await self._complete(flight, generation)
        elif generation.status == "aborted":
            self._requeue_preempted(flight, generation)
        else:
            self._fail(flight, generation.reason or "failed without a reason")

    def _attempt(self, flight: _Flight) -> Attempt:
        trajectory = flight.trajectory
        return Attempt(
            pipeline=self._pipeline,
            batch=trajectory.batch.number,
            trajectory=trajectory.index,
            attempt=flight.attempt,
            dp_rank=flight.engine.rank,
            evaluation=trajectory.batch.kind is BatchKind.EVAL,
            prefix=flight.prefix,
        )

    def _land(self, flight: _Flight) -> None:
        """The attempt is no longer on its engine."""
        flight.landed = True
        flight.engine.in_flight -= 1
        while self._limits and self._limits[0].landed:
            self._limits.popleft()
        if not self._limits and self._limit_timer is not None:
            self._limit_timer.cancel()
            self._limit_timer = None

    async def _complete(self, flight: _Flight, generation: Generation) -> None:
        trajectory = flight.trajectory
        batch = trajectory.batch
        segments = generation.segments or ((flight.version, 0),)
        sample = Sample(batch.number, trajectory.index, flight.attempt, flight.engine.rank, segments)
        if self._reward is not None:
            self.dispatch()  # its slot is free while the reward is computed
            await self._reward(sample)
            if not flight.counts:
                return
        if batch.kind is BatchKind.EVAL and any(version != batch.version for version, _ in segments):
            batch.queue_again(trajectory)  # the version changed under it
            return
        batch.accept(trajectory, sample)
        self._port.trajectory_completed(
            batch.number, len(batch.samples), trajectory.index, flight.attempt, flight.engine.rank, segments
        )

    def _requeue_preempted(self, flight: _Flight, generation: Generation) -> None:
        trajectory = flight.trajectory
        trajectory.prefix = generation.segments if self._job.spec.partial is Partial.RESUME else ()
        trajectory.batch.queue_again(trajectory)

    def _fail(self, flight: _Flight, reason: str) -> None:
        """The attempt counts as a failure: try again, or give the trajectory up."""
        trajectory = flight.trajectory
        batch = trajectory.batch
        trajectory.failures += 1
        trajectory.avoid = flight.engine.rank
        if trajectory.failures < self._job.max_attempts:
            batch.queue_again(trajectory)
            return
        why = f"given up after {trajectory.failures} attempts: {reason}"
        batch.give_up(trajectory, why)
        self._tell_dropped(batch, trajectory.index, why)
        self._port.demand_changed(batch.number, batch.target, len(batch.samples), why)

    def _drop(self, batch: RolloutBatch, gone: list[Sample], reason: str) -> None:
        """Accepted samples turn out useless; their demand comes back."""
        batch.replace(gone)
        for sample in gone:
            self._tell_dropped(batch, sample.trajectory, reason)
        self._port.demand_changed(batch.number, batch.target, len(batch.samples), reason)

    def _tell_dropped(self, batch: RolloutBatch, trajectory: int, reason: str) -> None:
        self._port.tell(
            events.TrajectoryDropped(pipeline=self._pipeline, batch=batch.number, trajectory=trajectory, reason=reason)
        )

    # --- limits and engines that misbehave ------------------------------------------------------------

    def _watch(self, flight: _Flight) -> None:
        self._limits.append(flight)
        if self._limit_timer is None:
            self._limit_timer = self._clock.call_at_ns(flight.deadline, self._on_limit)

    def _on_limit(self) -> None:
        """Abort every attempt past its limit, give it to another engine, and name the engines that fell silent."""
        now = self._clock.now_ns()
        self._limit_timer = None
        silent: dict[_Engine, int] = {}
        while self._limits and (self._limits[0].landed or self._limits[0].deadline <= now):
            flight = self._limits.popleft()
            if not flight.landed:
                self._expire(flight)
                silent[flight.engine] = silent.get(flight.engine, 0) + 1
        if self._limits:
            self._limit_timer = self._clock.call_at_ns(self._limits[0].deadline, self._on_limit)
        for engine, count in silent.items():
            self._suspect(engine, count)
        self.dispatch()

    def _expire(self, flight: _Flight) -> None:
        assert flight.worker is not None
        flight.worker.retire()
        if self._is_current(flight) and flight.engine.answered_ns < flight.deadline - self._job.reissue_after:
            flight.engine.unanswered[flight.trajectory] = None
        if flight.counts:
            self._fail(flight, f"no answer from engine {flight.engine.rank} within {show_s(self._job.reissue_after)}")

    def _suspect(self, engine: _Engine, count: int) -> None:
        """A long trajectory is no proof against its engine, even alone there. Two that it leaves unanswered are, and so
        is one with a single attempt left: better a fresh engine for that."""
        last_chance = any(trajectory.failures >= self._job.max_attempts - 1 for trajectory in engine.unanswered)
        if engine.open and (last_chance or len(engine.unanswered) >= FAILURES_IN_A_ROW):
            limit = show_s(self._job.reissue_after)
            self._port.engine_suspected(engine.rank, f"{count} attempts got no answer within {limit}")
            self._rest(engine)

    def _judge(self, flight: _Flight, generation: Generation) -> None:
        """Failures in a row, or a refusal behind an open gate, earn the engine a rest."""
        engine = flight.engine
        if not self._is_current(flight):
            return
        if generation.status == "completed" or generation.answered:
            engine.failures = 0
            engine.unanswered.clear()
            engine.answered_ns = self._clock.now_ns()
            return
        engine.failures += generation.status == "failed"
        if generation.status == "aborted" or engine.failures >= FAILURES_IN_A_ROW:
            self._rest(engine)

    @staticmethod
    def _is_current(flight: _Flight) -> bool:
        """Whether the engine is still as it was when the attempt started: how it ends says something about it."""
        return flight.engine.open and flight.opening == flight.engine.opening

    def _rest(self, engine: _Engine) -> None:
        if engine.resting or self._tasks is None:
            return
        engine.resting = True
        due = self._clock.now_ns() + REST_NS
        self._rest_timers[engine] = self._clock.call_at_ns(due, lambda: self._rested(engine))

    def _rested(self, engine: _Engine) -> None:
        self._wake_up(engine)
        self.dispatch()

    def _wake_up(self, engine: _Engine) -> None:
        engine.resting = False
        timer = self._rest_timers.pop(engine, None)
        if timer is not None:
            timer.cancel()

    def _cancel_timers(self) -> None:
        timers = list(self._rest_timers.values())
        self._rest_timers.clear()
        if self._limit_timer is not None:
            timers.append(self._limit_timer)
            self._limit_timer = None
        for timer in timers:
            timer.cancel()

    # --- engines by rank ------------------------------------------------------------------------------

    def _engine(self, dp_rank: int) -> _Engine | None:
        return next((engine for engine in self._engines if engine.rank == dp_rank), None)

    def _replace(self, old: _Engine | None, new: _Engine) -> _Engine:
        if old is not None:
            self._wake_up(old)
            old.open = False
            self._engines[self._engines.index(old)] = new
        else:
            self._engines.append(new)
            self._engines.sort(key=lambda engine: engine.rank)
        return new
