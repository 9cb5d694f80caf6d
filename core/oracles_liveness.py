"""L1 to L5: who waits too long, what lies idle, what moves for nothing.

L1  A pipeline with demand completes a trajectory within `bounds.rollout`. Its clock starts when demand and engines both
    exist, and again with each completed trajectory; a failure of its own starts it again too, but not for ever.
L2  A pipeline cut off from all its engines has failed by then. (The exact deadlock is found by the backend's calendar.)
L3  A non-rollout request is granted within `bounds.grant`.
L4  When an instant is over, no GPU is left free on which a declared engine with demand could have been woken, unless
    it is reserved for a request, or for a wider engine, all of whose other GPUs are being freed. Policy `batch` only.
L5  An engine is not given to another rollout within its residence, and is not put to sleep just to be woken again.

Demand is measured by open batches, whatever the policy under test. Deadlines lie in a heap and are moved lazily: a
completed trajectory only notes the time, and looks closer only if its pipeline never waited longer.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from core import actions, bounds, events
from core.closeness import Closest, Wait
from core.model import DemandPolicy, PipelineSpec
from core.observed import Observed
from core.observed_nouns import Doing, Engine, Gpu, Pipeline, Request, Watcher
from core.trace import Verdict
from core.units import show_s

if TYPE_CHECKING:
    from core.monitor import Monitor

EXCUSES = 8
"""Failures of its own that start a pipeline's clock again, between two completed trajectories."""


class Shrink(NamedTuple):
    """An engine was to be put to sleep; as things were when that was decided, for it may take a while to begin."""

    entry: int
    wanted: bool
    """Its pipeline had demand and did not ask for it."""
    early: bool
    """Within its residence, and no request for its GPUs to justify that."""


class LivenessOracles(Watcher):
    def __init__(self, monitor: "Monitor", demand: DemandPolicy, settle_ns: int) -> None:
        self._monitor = monitor
        self._observed: Observed = monitor.observed
        self._conserving = demand is DemandPolicy.BATCH
        self._settle_ns = settle_ns
        self._deadlines: list[tuple[int, int, str, int]] = []
        """(when, entry, pipeline, request number; -1: its rollout)."""
        self._since: dict[str, int] = {}
        """Pipelines with demand: when they last completed something, or began to want it."""
        self._scheduled: dict[str, None] = {}
        self._excuses: dict[str, int] = {}
        self._closest = Closest()
        """Of the waits that are over."""
        self._longest: dict[str, int] = {}
        """The longest of them for a trajectory (ns), by pipeline: a shorter one came no closer to the same bound."""
        self._bounds: dict[object, int] = {}
        self._sharers: dict[str, list[PipelineSpec]] = {}
        self._everyone: list[PipelineSpec] = []
        self._known = 0
        """How many registrations `_everyone` and what was computed from it go back to."""
        self._touched: deque[tuple[int, int]] = deque()
        self._touched_at: dict[int, int] = {}
        self._parked: dict[tuple[str, int], list[int]] = {}
        self._last_up: dict[str, int] = {}
        self._shrinks: dict[Engine, Shrink] = {}
        self._decided: dict[Engine, Shrink] = {}
        """Shrinks that were decided and have not begun."""
        self._withdrawn: dict[str, int] = {}
        """Entry in which a pipeline last stopped wanting anything, or gave its engines up."""
        self._request_gone: dict[int, int] = {}
        """Entry in which a request for a GPU last ended without a grant."""
        self._request_granted: dict[int, int] = {}
        """Entry in which a GPU was last promised to a request."""
        self._last_failure = -1
        self.checks: dict[type, Callable[[Any], None]] = {
            events.TrajectoryCompleted: self._progress,
            events.StateResent: self._resent,
            events.WeightsPublished: self._published,
            events.ActionFailed: self._action_failed,
            events.ActionUnknown: self._action_failed,
            events.EngineDied: self._own_failure,
            events.TrainerFailed: self._own_failure,
            events.EngineSuspected: self._own_failure,
            events.NodeLeft: self._node_left,
            actions.Note: self._decided_now,
            actions.SleepEngine: self._sleep,
            actions.WakeEngine: self._wake,
        }

    def advance(self, now_ns: int) -> None:
        """Time moves to `now_ns`: the instant before is over, and deadlines before it have passed."""
        if self._touched:
            self._settle(now_ns - self._settle_ns)
        while self._deadlines and self._deadlines[0][0] < now_ns and self._monitor.verdict is None:
            _, _, pipeline, request = heapq.heappop(self._deadlines)
            if request < 0:
                self._rollout_due(pipeline, now_ns)
            else:
                self._request_due(pipeline, request, now_ns)

    def quiescent(self) -> None:
        """The present instant is over too: nothing will happen any more."""
        self._settle(self._observed.now + 1)

    def _settle(self, before_ns: int) -> None:
        """Look at the GPUs last touched before that time."""
        while self._touched and self._touched[0][0] < before_ns:
            at, gpu = self._touched.popleft()
            if self._touched_at[gpu] == at:
                self._conserve(self._observed.gpus[gpu], at)

    # --- L1, L2: rollouts ------------------------------------------------------------------------------

    def demand_changed(self, pipeline: Pipeline, before: int) -> None:
        if pipeline.demand > before:
            self._review(pipeline)
        elif pipeline.demand == 0:
            self._stop_clock(pipeline)
            self._withdrawn[pipeline.id] = self._observed.entry

    def lifecycle_changed(self, pipeline: Pipeline) -> None:
        if pipeline.over:
            self._stop_clock(pipeline)
            self._withdrawn[pipeline.id] = self._observed.entry
        elif pipeline.releasing:
            self._withdrawn[pipeline.id] = self._observed.entry
        else:
            self._review(pipeline)

    def _review(self, pipeline: Pipeline) -> None:
        """It may want rollout from now on, or more of it."""
        if not pipeline.wants_rollout:
            return
        if pipeline.id not in self._since:
            self._since[pipeline.id] = self._observed.now
            self._excuses[pipeline.id] = 0
            self._schedule(pipeline)
        self._touch_engines(pipeline)

    def _schedule(self, pipeline: Pipeline) -> None:
        if pipeline.id not in self._scheduled:
            self._scheduled[pipeline.id] = None
            when = self._since[pipeline.id] + self._rollout_bound(pipeline)
            heapq.heappush(self._deadlines, (when, self._observed.entry, pipeline.id, -1))

    def _rollout_due(self, id: str, now_ns: int) -> None:
        self._scheduled.pop(id, None)
        if id not in self._since or not self._monitor.concerns(id):
            return
        pipeline = self._observed.pipelines[id]
        bound = self._rollout_bound(pipeline)
        deadline = self._since[id] + bound
        if deadline >= now_ns:
            self._schedule(pipeline)
            return
        wait = self._rollout_wait(pipeline, now_ns)
        if wait.rule == "L1":
            text = f"{id} wants {pipeline.demand} trajectories and completed none in {show_s(bound)}"
        else:
            text = f"{id} is cut off from all its engines and did not end as failed in {show_s(bound)}"
        self._starved(wait, text, deadline)

    def _rollout_wait(self, pipeline: Pipeline, until_ns: int) -> Wait:
        rule = "L1" if any(self._feasible(engine) for engine in pipeline.engines) else "L2"
        waited = until_ns - self._since[pipeline.id]
        return Wait(rule, pipeline.id, "a trajectory", waited, self._rollout_bound(pipeline))

    def _feasible(self, engine: Engine) -> bool:
        gpus = (self._observed.gpus[gpu] for gpu in engine.gpus)
        return not engine.failing and not any(gpu.lost or gpu.quarantined for gpu in gpus)

    def _starved(self, wait: Wait, text: str, at_ns: int) -> None:
        self._closest.take(wait)
        self._monitor.breach(wait.rule, text, at_ns)
        self._monitor.decide(Verdict(outcome="starved", rule=wait.rule, text=text), at_ns)

    def _progress(self, event: events.TrajectoryCompleted) -> None:
        if event.pipeline in self._since:
            self._restart_clock(event.pipeline)
            self._excuses[event.pipeline] = 0

    def _restart_clock(self, id: str) -> None:
        now = self._observed.now
        if now - self._since[id] > self._longest.get(id, 0) and self._monitor.concerns(id):
            wait = self._rollout_wait(self._observed.pipelines[id], now)
            self._closest.take(wait)
            if wait.rule == "L1":
                self._longest[id] = wait.waited_ns
        self._since[id] = now

    def _stop_clock(self, pipeline: Pipeline) -> None:
        if pipeline.id in self._since:
            if self._monitor.concerns(pipeline.id):
                self._closest.take(self._rollout_wait(pipeline, self._observed.now))
            del self._since[pipeline.id]

    def _resent(self, event: events.StateResent) -> None:
        """Completed trajectories whose own messages were lost are progress too."""
        pipeline = self._observed.speaker(event)
        if pipeline is not None and pipeline.id in self._since and event.seq > pipeline.applied:
            before = sum(batch.delivered for batch in pipeline.batches.values())
            if sum(batch.delivered for batch in event.state.batches) > before:
                self._restart_clock(pipeline.id)

    def _own_failure(self, event: Any) -> None:
        self._last_failure = self._observed.entry + 1
        self._excuse(event.pipeline)

    def _excuse(self, id: str) -> None:
        if id in self._since and self._excuses[id] < EXCUSES:
            self._excuses[id] += 1
            self._restart_clock(id)

    def _action_failed(self, event: events.ActionFailed | events.ActionUnknown) -> None:
        self._last_failure = self._observed.entry + 1
        match self._observed.pending.get(event.action):
            case actions.AwaitMemory(gpus=gpus):
                for id in dict.fromkeys(e.pipeline.id for gpu in gpus for e in self._observed.gpus[gpu].engines):
                    self._excuse(id)
            case actions.EngineAction(pipeline=id) | actions.GrantLease(pipeline=id):
                self._excuse(id)

    def _node_left(self, event: events.NodeLeft) -> None:
        self._last_failure = self._observed.entry + 1
        for pipeline in self._observed.pipelines.values():
            if any(self._observed.cluster.node_of(gpu) == event.node for gpu in pipeline.spec.union):
                self._excuse(pipeline.id)

    # --- L3: requests ----------------------------------------------------------------------------------

    def request_filed(self, request: Request) -> None:
        when = request.filed_at + self._request_bound(request)
        heapq.heappush(self._deadlines, (when, self._observed.entry, request.pipeline.id, request.number))
        self._touch(request.gpus)

    def request_ended(self, request: Request) -> None:
        if self._monitor.concerns(request.pipeline.id):
            self._closest.take(self._request_wait(request, self._observed.now))
        if not request.granted:
            for id in request.gpus:
                self._request_gone[id] = self._observed.entry
        self._touch(self._parked.pop((request.pipeline.id, request.number), ()))

    def _request_due(self, id: str, number: int, now_ns: int) -> None:
        pipeline = self._observed.pipelines.get(id)
        request = pipeline.requests.get(number) if pipeline else None
        if request is None or not self._monitor.concerns(id):
            return
        wait = self._request_wait(request, now_ns)
        deadline = request.filed_at + wait.bound_ns
        if deadline >= now_ns:  # somebody came who may go first
            heapq.heappush(self._deadlines, (deadline, self._observed.entry, id, number))
            return
        asked = f"{request.role} ({request.priority.name})"
        self._starved(wait, f"{id} asked for {asked} and was not granted it in {show_s(wait.bound_ns)}", deadline)

    def _request_wait(self, request: Request, until_ns: int) -> Wait:
        waited, bound = until_ns - request.filed_at, self._request_bound(request)
        return Wait("L3", request.pipeline.id, request.priority.name, waited, bound)

    # --- how close all of them came --------------------------------------------------------------------

    def closest(self) -> tuple[Wait, ...]:
        """Of each rule with a bound, the wait that used most of it; those under way are as long as they are now."""
        closest, now = Closest(self._closest.waits()), self._observed.now
        for pipeline in self._observed.pipelines.values():
            if self._monitor.concerns(pipeline.id):
                if pipeline.id in self._since:
                    closest.take(self._rollout_wait(pipeline, now))
                for request in pipeline.requests.values():
                    closest.take(self._request_wait(request, now))
        return closest.waits()

    # --- bounds, computed when asked for and kept until somebody registers -------------------------------

    def _rollout_bound(self, pipeline: Pipeline) -> int:
        return self._bound(pipeline, pipeline.id, lambda *who: bounds.rollout(pipeline.spec, *who))

    def _request_bound(self, request: Request) -> int:
        spec, priority = request.pipeline.spec, request.priority
        return self._bound(request.pipeline, (spec.id, priority), lambda *who: bounds.grant(spec, priority, *who))

    def _bound(self, pipeline: Pipeline, key: object, formula: Callable[..., int]) -> int:
        if self._known != self._observed.registrations:
            self._known = self._observed.registrations
            self._everyone = [known.spec for known in self._observed.pipelines.values()]
            self._bounds.clear()
            self._longest.clear()
            self._sharers.clear()
        if key not in self._bounds:
            self._bounds[key] = formula(self._sharers_of(pipeline.spec), self._everyone)
        return self._bounds[key]

    def _sharers_of(self, spec: PipelineSpec) -> list[PipelineSpec]:
        """Whoever shares GPUs with it, directly or through others, has the same sharers."""
        if spec.id not in self._sharers:
            sharers = bounds.sharers_of(spec, self._everyone)
            self._sharers.update((other.id, sharers) for other in sharers)
        return self._sharers[spec.id]

    # --- L4: work conservation -------------------------------------------------------------------------

    def gpu_changed(self, gpu: Gpu) -> None:
        if not self._conserving:
            return
        self._touch((gpu.id,))
        for engine in gpu.engines:
            if len(engine.gpus) > 1:
                self._touch(engine.gpus)
        if self._parked:
            for key in gpu.waiting:
                self._touch(self._parked.pop(key, ()))

    def decoding_changed(self, engine: Engine) -> None:
        """Nothing waits for that."""

    def engine_changed(self, engine: Engine) -> None:
        pipeline = engine.pipeline
        before = self._last_up.get(pipeline.id, 0)
        now = pipeline.up + len(pipeline.promised)
        if now != before:
            self._last_up[pipeline.id] = now
            if now < before:
                self._touch_engines(pipeline)

    def _published(self, event: events.WeightsPublished) -> None:
        pipeline = self._observed.pipelines.get(event.pipeline)
        if pipeline is not None and pipeline.published < 0:
            self._touch_engines(pipeline)

    def _touch_engines(self, pipeline: Pipeline) -> None:
        for engine in pipeline.engines:
            if not engine.up:
                self._touch(engine.gpus)

    def _touch(self, ids: Iterable[int]) -> None:
        """Look at these GPUs when the instant is over."""
        now, gpus = self._observed.now, self._observed.gpus
        for id in ids if self._conserving else ():
            if gpus[id].tenant is None and self._touched_at.get(id) != now:
                self._touched_at[id] = now
                self._touched.append((now, id))

    def _conserve(self, gpu: Gpu, at_ns: int) -> None:
        if not gpu.free or gpu.watches:
            return
        for engine in gpu.engines:
            pipeline = engine.pipeline
            free = self._could_wake(engine) and all(self._open_to(engine, self._observed.gpus[g]) for g in engine.gpus)
            if free and not self._reserved(engine, gpu):
                want = f"{pipeline.id} wants {pipeline.demand} trajectories and has {pipeline.up} engines"
                self._monitor.breach("L4", f"GPU {gpu.id} is idle; {want}; {engine.id} could be woken there", at_ns)
                return

    def _could_wake(self, engine: Engine) -> bool:
        pipeline = engine.pipeline
        return (
            engine.doing is Doing.ASLEEP
            and not engine.failing
            and pipeline.wants_rollout
            and not pipeline.releasing
            and pipeline.published >= 0
            and bounds.worth_waking(pipeline.demand, self._up_or_coming(pipeline), len(pipeline.engines))
        )

    def _up_or_coming(self, pipeline: Pipeline) -> int:
        """Engines that are up, or will be as soon as the last of their GPUs is freed."""
        return pipeline.up + sum(map(self._half_free, pipeline.promised))

    def _open_to(self, engine: Engine, gpu: Gpu) -> bool:
        memory = engine.pipeline.spec.memory
        need = memory.engine - memory.residue + self._observed.cluster.memory_margin
        return gpu.free and not gpu.watches and (gpu.free_bytes is None or gpu.free_bytes >= need)

    def _reserved(self, engine: Engine, gpu: Gpu) -> bool:
        """Exception (a): somebody else is about to use one of its GPUs, and only waits for others to be freed."""
        gpus = self._observed.gpus
        for id in engine.gpus:
            for key, request in gpus[id].waiting.items():
                if all(gpus[other].being_freed for other in request.gpus):
                    self._parked.setdefault(key, []).append(gpu.id)
                    return True
            for rival in gpus[id].engines:
                coming = rival in rival.pipeline.promised or self._could_wake(rival)
                if rival is not engine and coming and self._half_free(rival):
                    return True
        return False

    def _half_free(self, engine: Engine) -> bool:
        gpus = [self._observed.gpus[gpu] for gpu in engine.gpus]
        ready = all(gpu.free and not gpu.watches for gpu in gpus)
        return not ready and all(gpu.being_freed for gpu in gpus)

    # --- L5: thrash ------------------------------------------------------------------------------------

    def _decided_now(self, note: actions.Note) -> None:
        if note.kind == "grant":
            self._request_granted |= dict.fromkeys(note.gpus, self._observed.entry + 1)
        engine = self._observed.engine(note.pipeline, note.dp_rank) if note.kind in ("shrink", "expand") else None
        if engine is not None:
            self._decided.pop(engine, None)
            if note.kind == "shrink":
                self._decided[engine] = self._shrink(engine)

    def _sleep(self, action: actions.SleepEngine) -> None:
        engine = self._observed.engine(action.pipeline, action.dp_rank)
        if engine is not None:
            self._shrinks[engine] = self._decided.pop(engine, None) or self._shrink(engine)

    def _shrink(self, engine: Engine) -> Shrink:
        pipeline, now = engine.pipeline, self._observed.now
        wanted = pipeline.wants_rollout and not pipeline.releasing and not engine.failing
        since = engine.routable_since
        young = since is None or now - since < pipeline.spec.min_residence
        spare = pipeline.up > pipeline.demand
        asked_for = any(self._observed.gpus[gpu].waiting for gpu in engine.gpus)
        early = wanted and young and not spare and not asked_for
        return Shrink(self._observed.entry + 1, wanted, early)

    def _wake(self, action: actions.WakeEngine) -> None:
        engine = self._observed.engine(action.pipeline, action.dp_rank)
        if engine is None:
            return
        gpus = [self._observed.gpus[gpu] for gpu in engine.gpus]
        for gpu in gpus:
            donor = gpu.last
            if not isinstance(donor, Engine) or donor.pipeline is engine.pipeline:
                continue
            shrink = self._shrinks.pop(donor, None)
            if shrink and shrink.early:
                residence = show_s(donor.pipeline.spec.min_residence)
                self._monitor.breach("L5", f"{donor.id} gave GPU {gpu.id} to {engine.id} within {residence}")
        shrink = self._shrinks.pop(engine, None)
        if shrink and shrink.wanted and all(gpu.last is engine for gpu in gpus) and not self._excused(engine, shrink):
            self._monitor.breach("L5", f"{engine.id} is put to sleep and woken again; nobody used its GPUs meanwhile")

    def _excused(self, engine: Engine, shrink: Shrink) -> bool:
        """Whoever its GPUs were meant for stopped wanting them, or something failed."""
        if self._last_failure > shrink.entry:
            return True
        for id in engine.gpus:
            if self._request_gone.get(id, -1) > shrink.entry:
                return True
            rivals = self._observed.gpus[id].engines
            if any(self._withdrawn.get(rival.pipeline.id, -1) > shrink.entry for rival in rivals):
                return True
            beside = (gpu for rival in rivals if rival is not engine for gpu in rival.gpus)
            if any(self._request_granted.get(gpu, -1) > shrink.entry for gpu in beside):
                return True  # a wider engine was to come, and a request took another of its GPUs
        return False
