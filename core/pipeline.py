"""One pipeline's RL loop, backend-agnostic, and the four hooks by which someone else's loop is driven instead.

Rules of this room:

1. Demand is declared first: a batch is opened with its target before anything is waited for, and closed when the
   trainer takes it, before training.
2. Training batch number i is trained at version i, and up to `staleness` + 1 are open at once: while step i trains,
   the engines already fill the batches after it.
3. The trainer touches GPUs only under a lease, onloads after the grant and offloads before the release. One lease at a
   time: nobody here holds one GPU and waits for another.
4. However the loop ends, it ends in `port.leave`, shielded and within `CLEANUP_S`: that is what gives back a lease
   whose trainer cannot be trusted to have offloaded. Cleanup never hides the error that caused it.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import anyio

from core import events
from core.backend import Backend, Clock, Phase
from core.config import Job
from core.errors import Conflict, PipelineFailed, RequestError, TurnstileError
from core.gateway import Gateway, Reward
from core.model import BatchKind, Priority, Role
from core.port import Lease, Port
from core.samples import RolloutBatch, Sample

CLEANUP_S = 60
"""Seconds that leaving may take, whatever happened."""

CANCELLED = "cancelled"


class Stage(NamedTuple):
    """One thing a step needs GPUs for."""

    role: Role
    priority: Priority
    phase: Phase


ROLE_OF: dict[Priority, Role] = {
    Priority.ACTOR_TRAINING: Role.ACTOR_TRAIN,
    Priority.OLD_LOG_PROBS: Role.ACTOR_TRAIN,
    Priority.CRITIC_TRAINING: Role.CRITIC,
    Priority.VALUE_COMPUTE: Role.CRITIC,
    Priority.REF_LOG_PROBS: Role.REFERENCE,
}


def stages_before_training(job: Job) -> tuple[Stage, ...]:
    """What comes before the actor's own training, in the field's usual order: log-probs and values of the batch, then
    the critic. Two stages of one group follow each other, so that one atomic release-then-request joins them."""
    stages = []
    if job.old_log_probs:
        stages.append(Stage(Role.ACTOR_TRAIN, Priority.OLD_LOG_PROBS, "log_probs"))
    if job.spec.group(Role.REFERENCE) is not None:
        stages.append(Stage(Role.REFERENCE, Priority.REF_LOG_PROBS, "log_probs"))
    if job.spec.group(Role.CRITIC) is not None:
        stages.append(Stage(Role.CRITIC, Priority.VALUE_COMPUTE, "values"))
        stages.append(Stage(Role.CRITIC, Priority.CRITIC_TRAINING, "train"))
    return tuple(stages)


async def wait_until(clock: Clock, when_ns: int) -> None:
    """Sleep on the backend's clock, exact to the nanosecond."""
    rung = anyio.Event()
    timer = clock.call_at_ns(when_ns, rung.set)
    try:
        await rung.wait()
    finally:
        timer.cancel()


def describe(error: BaseException | None) -> str | None:
    """An error in one line; with its type where it is none of ours, for then it is a bug."""
    if error is None:
        return None
    if isinstance(error, TurnstileError):
        return str(error)
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else CANCELLED


def first_error(problem: Exception) -> Exception:
    """What went wrong first: task groups collect their children's errors in the order in which they happened."""
    while isinstance(problem, ExceptionGroup):
        problem = problem.exceptions[0]
    return problem


class Trainer:
    """The pipeline's worker groups on the training side: at most one lease, and phases under it."""

    def __init__(self, pipeline: str, port: Port, backend: Backend, gateway: Gateway) -> None:
        self._pipeline = pipeline
        self._port = port
        self._backend = backend
        self._gateway = gateway
        self.version = -1
        """Weights the trainer holds: the latest it published."""
        self._role = Role.ACTOR_TRAIN
        self._lease: Lease | None = None
        self._onloaded = False

    async def initialise(self) -> None:
        """Acquire every GPU of the pipeline and bring all its workers up."""
        await self._acquire(Role.ACTOR_TRAIN, Priority.INITIALIZATION)
        self._onloaded = True
        await self.phase("init")

    async def onload(self, role: Role, priority: Priority) -> None:
        """Swap whatever is held for the lease of `role`, and load it."""
        if self._lease is not None and self._role is role:
            await self.offload()
            self._lease = await self._port.release_and_request(self._lease, role, priority)
        else:
            await self.release()
            await self._acquire(role, priority)
        self._onloaded = True
        await self.phase("onload")

    async def phase(self, phase: Phase, version: int = -1) -> None:
        """Run one phase of the group that holds the lease. Raises Conflict without one, OperationFailed if it fails."""
        if self._lease is None:
            raise Conflict(f"{self._pipeline}: {phase} without a lease")
        error: BaseException | None = None
        self._port.tell(
            events.PhaseStarted(pipeline=self._pipeline, role=self._role, phase=phase, gpus=self._lease.gpus)
        )
        try:
            await self._backend.phase(self._pipeline, self._role, phase, self._lease.epoch, version)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._port.tell(
                events.PhaseEnded(pipeline=self._pipeline, role=self._role, phase=phase, error=describe(error))
            )

    async def publish(self, version: int) -> None:
        """Put the weights into the cache as `version`, and say so."""
        await self.phase("publish", version)
        self.version = version
        self._port.weights_published(version)
        self._gateway.published(version)

    async def offload(self) -> None:
        if self._onloaded:
            await self.phase("offload")
            self._onloaded = False

    async def release(self) -> None:
        """Offload and give the lease back; nothing to do without one."""
        if self._lease is None:
            return
        await self.offload()
        lease, self._lease = self._lease, None
        self._port.release(lease)

    async def _acquire(self, role: Role, priority: Priority) -> None:
        self._lease = await self._port.request(role, priority)
        self._role = role


class Hooks:
    """The four hooks by which a training loop is driven. Whoever's loop it is calls, for each step:

        open_batch(batch, target)          before it waits for data
        taken = await before_step(step)    waits for the batch, takes it, and holds the loaded trainer on return
        ...                                train
        await after_step(step, version)    publishes the weights and gives the GPUs back
        await release_only()               instead of after_step, when the step produced nothing

    Steps count from 0 and take the training batches in the order in which they were opened.
    """

    def __init__(self, job: Job, port: Port, gateway: Gateway, trainer: Trainer) -> None:
        self._pipeline = job.spec.id
        self._port = port
        self._gateway = gateway
        self._trainer = trainer
        self._open: dict[int, RolloutBatch] = {}
        self._opened = 0
        self._taken: list[Sample] = []
        self.on_published: Callable[[int], None] = lambda step: None
        """Called by `after_step` once the step's weights are published and before its GPUs go back: the moment to open
        the next batch, so that the scheduler knows the demand when it gives the GPUs away."""

    def open_batch(self, batch: int, target: int, kind: BatchKind = BatchKind.TRAIN) -> RolloutBatch:
        """Declare that `target` trajectories are wanted; numbers ascend over both kinds. Returns at once."""
        self._port.batch_opened(batch, target, kind)
        self._port.rollout_signal(batch)
        opened = self._gateway.open_batch(batch, target, kind)
        if kind is BatchKind.TRAIN:
            self._open[self._opened] = opened
            self._opened += 1
        return opened

    async def before_step(self, step: int, priority: Priority = Priority.ACTOR_TRAINING) -> list[Sample]:
        """Take the step's batch once it is full, then hold the GPUs for `priority` with its group loaded. May be called
        again within a step for its next stage. Raises PipelineFailed if no trajectory of the batch came back."""
        if step in self._open:
            await self._take(self._open.pop(step))
        elif step >= self._opened:
            raise Conflict(f"{self._pipeline}: step {step} has no batch; open_batch comes first")
        await self._trainer.onload(ROLE_OF[priority], priority)
        return self._taken

    async def after_step(self, step: int, version: int) -> None:
        """The actor was trained: publish `version`, report the step, offload and release."""
        await self._trainer.publish(version)
        self._port.tell(events.StepCompleted(pipeline=self._pipeline, step=step))
        self.on_published(step)
        await self._trainer.release()

    async def release_only(self) -> None:
        """Offload and release; no new weights. Safe to call without a lease."""
        await self._trainer.release()
        self._gateway.step_ended()

    async def _take(self, batch: RolloutBatch) -> None:
        version = self._trainer.version
        self._taken = await self._gateway.take(batch, version)
        self._port.batch_closed(batch.number, "taken")
        self._port.tell(
            events.BatchTaken(
                pipeline=self._pipeline,
                batch=batch.number,
                version=version,
                trajectories=tuple(sample.trajectory for sample in self._taken),
                staleness=tuple(version - sample.version for sample in self._taken),
            )
        )


class Loop(Protocol):
    """A training loop on the hooks. `begin` is called at the end of initialisation, which still holds its lease: the
    moment to open the first batches. `run` returns when all steps are done."""

    def begin(self) -> None: ...
    async def run(self) -> None: ...


class TrainingLoop:
    """The loop of `Job`: `steps` steps of `target` trajectories, evaluations in between."""

    def __init__(self, job: Job, port: Port, gateway: Gateway, hooks: Hooks, trainer: Trainer) -> None:
        self._job = job
        self._port = port
        self._gateway = gateway
        self._hooks = hooks
        self._trainer = trainer
        self._stages = stages_before_training(job)
        self._batches = 0
        self._opened = 0
        self._evaluation: RolloutBatch | None = None
        hooks.on_published = self._published

    def begin(self) -> None:
        self._open_through(self._job.spec.staleness)

    async def run(self) -> None:
        for step in range(self._job.steps):
            # An evaluation stays on one version, so it ends before the step that publishes the next one; and before
            # that step's lease, which may need the very GPUs it runs on.
            await self._finish_evaluation()
            await self._train(step)
        await self._finish_evaluation()

    def _published(self, step: int) -> None:
        """Demand first: what comes next is opened while the trainer still holds its GPUs."""
        self._evaluate_after(step)
        self._open_through(step + 1 + self._job.spec.staleness)

    def _open_through(self, last: int) -> None:
        """Open every training batch up to number `last` that is not open yet."""
        for _ in range(self._opened, min(last + 1, self._job.steps)):
            self._opened += 1
            self._open(self._job.target, BatchKind.TRAIN)

    def _open(self, target: int, kind: BatchKind) -> RolloutBatch:
        number = self._batches
        self._batches += 1
        return self._hooks.open_batch(number, target, kind)

    async def _train(self, step: int) -> None:
        for stage in self._stages:
            await self._hooks.before_step(step, stage.priority)
            await self._trainer.phase(stage.phase)
        await self._hooks.before_step(step)
        await self._trainer.phase("train")
        await self._hooks.after_step(step, step + 1)

    def _evaluate_after(self, step: int) -> None:
        evaluation = self._job.evaluation
        if evaluation is not None and (step + 1) % evaluation.every == 0:
            self._evaluation = self._open(evaluation.trajectories, BatchKind.EVAL)

    async def _finish_evaluation(self) -> None:
        if self._evaluation is None:
            return
        batch, self._evaluation = self._evaluation, None
        await self._gateway.filled(batch)
        self._gateway.close_batch(batch)
        self._port.batch_closed(batch.number, "evaluated")


class Pipeline:
    """One job from registration to the end. Build it, then await `run` once; it is also the `Gates` of its port."""

    def __init__(
        self,
        job: Job,
        port: Port,
        backend: Backend,
        *,
        loop: Callable[[Hooks], Loop] | None = None,
        reward: Reward | None = None,
        may_dispatch: Callable[[], Awaitable[None]] | None = None,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`loop` replaces the built-in training loop, `reward` the declared duration. No trajectory is dispatched
        before `may_dispatch` returned. `on_failure` hears of an error at once, before the cleanup."""
        self.job = job
        self.id = job.spec.id
        self._port = port
        self._clock = backend.clock
        self._may_dispatch = may_dispatch
        self._on_failure = on_failure
        self._gateway = Gateway(job, port, backend, reward or self._declared_reward())
        self._trainer = Trainer(self.id, port, backend, self._gateway)
        self.hooks = Hooks(job, port, self._gateway, self._trainer)
        self._loop = (
            loop(self.hooks) if loop is not None else TrainingLoop(job, port, self._gateway, self.hooks, self._trainer)
        )
        self._known = False
        self._failure: str | None = None
        self._scope: anyio.CancelScope | None = None
        port.gates = self

    async def run(self) -> None:
        """Run all steps and leave. Raises the first error there was (PipelineFailed if the scheduler ended it)."""
        why: str | None = CANCELLED
        error = trouble = None
        try:
            error = await self._outcome()
            why = describe(error)
        finally:
            trouble = await self._leave(why)
        if error is not None or trouble is not None:
            raise error or trouble  # type: ignore[misc]

    # --- gates ----------------------------------------------------------------------------------------

    def open_gate(self, dp_rank: int, version: int, epoch: int) -> None:
        self._gateway.open_gate(dp_rank, version, epoch)

    def close_gate(self, dp_rank: int) -> None:
        self._gateway.close_gate(dp_rank)

    def failed(self, reason: str) -> None:
        """The scheduler failed this pipeline: whatever it does is cancelled, and `run` raises PipelineFailed."""
        self._failure = self._failure or reason
        if self._scope is not None:
            self._scope.cancel()

    def vanish(self) -> None:
        """The client's process is gone without a word: nothing is said from now on, not even goodbye. Whoever calls
        this also cancels `run`."""
        self._known = False
        self._port.close()

    # --- one life -------------------------------------------------------------------------------------

    async def _outcome(self) -> Exception | None:
        """The error the pipeline ended with, or None when all steps are done. Cancellation passes through."""
        error: Exception | None = None
        finished = False
        try:
            with anyio.CancelScope() as self._scope:
                async with self._gateway:
                    await self._live()
                    finished = True
        except Exception as problem:
            error = first_error(problem)
        if self._failure is not None and not finished:
            error = PipelineFailed(self.id, self._failure)
        if error is not None:
            self._on_failure(error)
        return error

    async def _live(self) -> None:
        await self._enter()
        async with anyio.create_task_group() as side:
            if self._may_dispatch is not None:
                self._gateway.hold_back()
                side.start_soon(self._let_go_when_told, self._may_dispatch)
            await self._initialise()
            await self._loop.run()
            side.cancel_scope.cancel()

    async def _enter(self) -> None:
        self._known = True
        try:
            await self._port.register(self.job.spec)
        except RequestError:
            self._known = False
            raise
        await self._port.admit()

    async def _initialise(self) -> None:
        """Bring the workers up, publish version 0, and declare the first demand before the GPUs go back."""
        await self._trainer.initialise()
        await self._trainer.publish(0)
        await self._trainer.offload()
        self._loop.begin()
        await self._trainer.release()

    async def _let_go_when_told(self, may_dispatch: Callable[[], Awaitable[None]]) -> None:
        await may_dispatch()
        self._gateway.let_go()

    async def _leave(self, why: str | None) -> Exception | None:
        """Tell the scheduler that it is over, whatever happens meanwhile. Returns what went wrong with that."""
        if not self._known:
            return None
        try:
            with anyio.move_on_after(CLEANUP_S, shield=True) as cleanup:
                await self._port.leave(why)
        except Exception as problem:
            return problem
        if cleanup.cancelled_caught:
            return PipelineFailed(self.id, f"its workers were not stopped within {CLEANUP_S} s")
        return None

    def _declared_reward(self) -> Reward | None:
        duration = self.job.reward_s
        if not duration:
            return None

        async def reward(sample: Sample) -> None:
            await wait_until(self._clock, self._clock.now_ns() + duration)

        return reward
