"""Where the time went: the figures of the summary, added up while the run goes on, from entries alone.

1. A listener like any other: a log file fed to it gives the same figures as the run itself (I53).
2. All sums are integer ns; busy + switching + idle of each GPU is the makespan exactly. Seconds appear in `summary`.
3. The makespan ends with the last entry, or with the verdict. It begins with the log; in a log that begins with
   pipelines of another run, at the first word of one of our own.
4. Demand is measured by open batches, whatever the policy: that is how the cost of `floor` becomes visible.

What a GPU's time counts as is said in `core.timeline`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from core import actions, events
from core.config import Scenario
from core.idle_holders import IdleHolders
from core.observed import Observed
from core.observed_nouns import Engine, Gpu, Pipeline, Request, Watcher
from core.timeline import BUSY, IDLE, STATES, SWITCHING, Segment, Timeline
from core.trace import Header, Verdict, Violation
from core.units import seconds


class Account:
    """One pipeline's figures."""

    __slots__ = (
        "attracted_expands", "completed_at", "dropped", "error", "lost_turns", "max_wait_ns", "resizes", "staleness",
        "steps_done", "tokens", "trained", "waiting_since",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps_done = 0
        self.trained = 0
        self.resizes = 0
        self.error: str | None = None
        self.max_wait_ns = 0
        self.waiting_since: int | None = None
        """Since when it has had demand and no routable engine."""
        self.dropped: dict[str, int] = {}
        """Trajectories by reason."""
        self.staleness: dict[int, int] = {}
        """Trained trajectories by versions behind."""
        self.tokens = 0
        """Of accepted trajectories, trained or not."""
        self.attracted_expands = 0
        """Engines woken for it while it had no open-batch demand."""
        self.completed_at = -1
        """When it last wanted less (ns): it completed a trajectory, also where only the state resent says so."""
        self.lost_turns = 0
        """Engines that were put to sleep after a whole turn (`limits.turn`) in which it completed nothing."""


class Accounting(Watcher):
    """A listener that adds up. `keep_segments`: how many timeline segments to keep a GPU, the first ones; 0: none."""

    def __init__(self, scenario: Scenario, keep_segments: int = 0) -> None:
        cluster = scenario.cluster
        self.observed = Observed(cluster, self)
        self.accounts: dict[str, Account] = {job.spec.id: Account() for job in scenario.jobs}
        self._own = dict.fromkeys(self.accounts)
        self.handovers = 0
        self.sums: list[dict[str, int]] = [{BUSY: 0, SWITCHING: 0, IDLE: 0} for _ in range(cluster.gpus)]
        self.segments: list[list[Segment]] = [[] for _ in range(cluster.gpus)]
        self.segments_left_out = 0
        self.idle_holders = IdleHolders(self.observed)
        self.verdict: Verdict | None = None
        self._before: _Before | None = None
        """What is not ours; None as long as none of our pipelines has spoken."""
        self._strangers = False
        """Whether another run's pipeline has spoken."""
        self._keep = keep_segments
        self._timeline = Timeline(self.observed.gpus, self._segment)
        self._serials = [0] * cluster.gpus
        self._promised: dict[int, str] = {}
        """GPU -> the pipeline whose request it is promised to."""
        self._reserved_since: dict[int, int] = {}
        self._reserved_ns = [0] * cluster.gpus
        self._counters: dict[type, Callable[[Any], None]] = {
            events.TrajectoryCompleted: self._completed,
            events.TrajectoryDropped: self._dropped,
            events.BatchTaken: self._batch_taken,
            events.StepCompleted: self._step_completed,
            events.PipelineEnded: self._ended,
            events.PipelineRegistered: self._registered,
            events.PhaseStarted: lambda event: self._timeline.phase_started(event, self.observed.now),
            events.PhaseEnded: lambda event: self._timeline.phase_ended(event, self.observed.now),
            actions.WakeEngine: self._woken,
            actions.SleepEngine: self._shrunk,
            actions.Note: self._note,
        }

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        if self.verdict is not None:
            return
        self.observed.now = t_ns
        if type(item) is Verdict:
            self.verdict = item
            return
        count = self._counters.get(type(item))
        if count is not None:
            count(item)
        self.observed.apply(i, t_ns, cause, item)

    @property
    def makespan_ns(self) -> int:
        return self.observed.now - self._left_out().until_ns

    def _left_out(self) -> "_Before":
        return self._before or _Before(0, 0, [{BUSY: 0, SWITCHING: 0, IDLE: 0} for _ in self.sums])

    def max_wait_ns(self, pipeline: str) -> int:
        """Longest wait of a pipeline so far, unfinished ones included."""
        account, known = self.accounts[pipeline], self.observed.pipelines.get(pipeline)
        began = [request.filed_at for request in known.requests.values()] if known else []
        if account.waiting_since is not None:
            began.append(account.waiting_since)
        return max(account.max_wait_ns, max((self.observed.now - since for since in began), default=0))

    # --- counting --------------------------------------------------------------------------------------

    def _registered(self, event: events.PipelineRegistered) -> None:
        if event.pipeline not in self._own:
            self._strangers = True
        elif self._before is None:
            if self._strangers:
                self.finish()
                self._before = _Before(self.observed.now, self.handovers, [dict(sums) for sums in self.sums])
            else:
                self._before = self._left_out()

    def _account(self, pipeline: str) -> Account:
        account = self.accounts.get(pipeline)
        if account is None:
            account = self.accounts[pipeline] = Account()
        return account

    def _completed(self, event: events.TrajectoryCompleted) -> None:
        if self.observed.applies(event):
            account = self._account(event.pipeline)
            for _, tokens in event.segments:
                account.tokens += tokens

    def _dropped(self, event: events.TrajectoryDropped) -> None:
        dropped = self._account(event.pipeline).dropped
        dropped[event.reason] = dropped.get(event.reason, 0) + 1

    def _batch_taken(self, event: events.BatchTaken) -> None:
        account = self._account(event.pipeline)
        account.trained += len(event.trajectories)
        for behind in event.staleness:
            account.staleness[behind] = account.staleness.get(behind, 0) + 1

    def _step_completed(self, event: events.StepCompleted) -> None:
        self._account(event.pipeline).steps_done += 1

    def _ended(self, event: events.PipelineEnded) -> None:
        self._account(event.pipeline).error = event.error

    def _woken(self, action: actions.WakeEngine) -> None:
        account = self._account(action.pipeline)
        account.resizes += 1
        engine = self.observed.engine(action.pipeline, action.dp_rank)
        if engine is not None and engine.pipeline.demand == 0:
            account.attracted_expands += 1
            self.idle_holders.woken_without_demand(engine)

    def _shrunk(self, action: actions.SleepEngine) -> None:
        account = self._account(action.pipeline)
        account.resizes += 1
        engine = self.observed.engine(action.pipeline, action.dp_rank)
        if engine is None or engine.routable_since is None or engine.pipeline.demand == 0:
            return
        if account.completed_at < engine.routable_since <= self.observed.now - engine.pipeline.spec.limits.turn:
            account.lost_turns += 1

    def _note(self, note: actions.Note) -> None:
        if note.kind == "grant":
            for gpu in note.gpus:
                self._promise(self.observed.gpus[gpu], note.pipeline)

    # --- waiting ---------------------------------------------------------------------------------------

    def demand_changed(self, pipeline: Pipeline, before: int) -> None:
        if pipeline.demand < before:
            self._account(pipeline.id).completed_at = self.observed.now
        if (before == 0) != (pipeline.demand == 0):
            self._review(pipeline)
        if before == 0 or pipeline.demand < len(pipeline.engines):  # else neither idle nor hungry can have changed
            self.idle_holders.pipeline_changed(pipeline)

    def decoding_changed(self, engine: Engine) -> None:
        observed, update = self.observed, self._timeline.update
        for gpu in engine.gpus:
            update(observed.gpus[gpu], observed.now)

    def engine_changed(self, engine: Engine) -> None:
        self.decoding_changed(engine)
        self._review(engine.pipeline)
        self.idle_holders.pipeline_changed(engine.pipeline)

    def lifecycle_changed(self, pipeline: Pipeline) -> None:
        self._review(pipeline)
        self.idle_holders.pipeline_changed(pipeline)

    def request_ended(self, request: Request) -> None:
        self._waited(self._account(request.pipeline.id), request.filed_at)
        for gpu in request.gpus:
            if not request.granted and self._promised.get(gpu) == request.pipeline.id:
                self._end_promise(gpu)

    def _review(self, pipeline: Pipeline) -> None:
        """It may have begun or ceased to wait for an engine."""
        account = self._account(pipeline.id)
        waits = pipeline.demand > 0 and pipeline.routable == 0 and not pipeline.over
        if waits and account.waiting_since is None:
            account.waiting_since = self.observed.now
        elif not waits and account.waiting_since is not None:
            self._waited(account, account.waiting_since)
            account.waiting_since = None

    def _waited(self, account: Account, since: int) -> None:
        account.max_wait_ns = max(account.max_wait_ns, self.observed.now - since)

    # --- GPUs ------------------------------------------------------------------------------------------

    def gpu_changed(self, gpu: Gpu) -> None:
        self._timeline.update(gpu, self.observed.now)
        self.idle_holders.gpu_changed(gpu)
        if gpu.serial != self._serials[gpu.id]:
            self._serials[gpu.id] = gpu.serial
            if gpu.tenant is not None and gpu.last is not None:
                self.handovers += gpu.tenant.pipeline.id != gpu.last.pipeline.id
        if gpu.id in self._promised:
            self._review_promise(gpu)

    def _promise(self, gpu: Gpu, pipeline: str) -> None:
        self._promised[gpu.id] = pipeline
        self._review_promise(gpu)

    def _review_promise(self, gpu: Gpu) -> None:
        """A promise is kept when the GPU, once free, has a tenant again."""
        if gpu.tenant is None:
            self._reserved_since.setdefault(gpu.id, self.observed.now)
        elif gpu.id in self._reserved_since:
            self._end_promise(gpu.id)

    def _end_promise(self, gpu: int) -> None:
        del self._promised[gpu]
        self._reserved_ns[gpu] += self.observed.now - self._reserved_since.pop(gpu, self.observed.now)

    def reserved_idle_ns(self, gpu: int) -> int:
        """How long the GPU was free, but promised to a request."""
        now = self.observed.now
        return self._reserved_ns[gpu] + now - self._reserved_since.get(gpu, now)

    def _segment(self, segment: Segment) -> None:
        self.sums[segment.gpu][STATES[segment.state]] += segment.end - segment.start
        kept = self.segments[segment.gpu]
        if len(kept) < self._keep:
            kept.append(segment)
        elif self._keep:
            self.segments_left_out += 1

    # --- the summary -----------------------------------------------------------------------------------

    def finish(self, end_ns: int | None = None) -> None:
        """Add up to the last entry, or to `end_ns`. More entries may follow, and another `finish`."""
        self.observed.now = max(self.observed.now, end_ns or 0)
        self._timeline.finish(self.observed.now)

    def summary(
        self,
        header: Header,
        outcome: str,
        violations: Sequence[Violation],
        diagnosis: str | None = None,
        end_ns: int | None = None,
    ) -> dict[str, Any]:
        """One run in the fields of `--json`. `end_ns`: when it ended, if after its last entry."""
        return {
            "scenario": header.scenario,
            "backend": header.backend,
            "demand": header.demand.value,
            "seed": header.seed,
            "outcome": outcome,
            **self.figures(end_ns),
            "violations": [{"rule": v.rule, "at_s": seconds(v.at_ns), "detail": v.detail} for v in violations],
            "diagnosis": diagnosis,
        }

    def figures(self, end_ns: int | None = None) -> dict[str, Any]:
        """Those of the fields that are counted here; times in seconds."""
        self.finish(end_ns)
        before = self._left_out()
        return {
            "makespan_s": seconds(self.makespan_ns),
            "handovers": self.handovers - before.handovers,
            "gpus": [_gpu_summary(gpu, *both) for gpu, both in enumerate(zip(self.sums, before.sums, strict=True))],
            "pipelines": [self._pipeline_summary(id) for id in self.accounts],
        }

    def _pipeline_summary(self, id: str) -> dict[str, Any]:
        account = self.accounts[id]
        return {
            "id": id,
            "steps_done": account.steps_done,
            "trajectories": account.trained,
            "max_wait_s": seconds(self.max_wait_ns(id)),
            "resizes": account.resizes,
            "error": account.error,
        }

    def details(self) -> dict[str, Any]:
        """What the summary has no field for; times in GPU-seconds or seconds."""
        return {
            "attracted": sum(account.attracted_expands for account in self.accounts.values()),
            "attracted_gpu_s": seconds(self.idle_holders.attracted_ns),
            "idle_held_gpu_s": seconds(self.idle_holders.wasted_ns),
            "reserved_idle_s": [seconds(self.reserved_idle_ns(gpu)) for gpu in range(len(self.sums))],
            "pipelines": {
                id: {
                    "dropped": dict(sorted(account.dropped.items())),
                    "staleness": {str(behind): account.staleness[behind] for behind in sorted(account.staleness)},
                    "tokens": account.tokens,
                    "lost_turns": account.lost_turns,
                }
                for id, account in self.accounts.items()
                if id in self._own
            },
        }


class _Before(NamedTuple):
    """What had added up when the first of our pipelines spoke."""

    until_ns: int
    handovers: int
    sums: list[dict[str, int]]


def _gpu_summary(gpu: int, sums: dict[str, int], before: dict[str, int]) -> dict[str, Any]:
    times = {
        field: sums[state] - before[state]
        for field, state in (("busy_s", BUSY), ("switching_s", SWITCHING), ("idle_s", IDLE))
    }
    return {"id": gpu} | {field: seconds(time) for field, time in times.items()}
