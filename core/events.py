"""Everything that can happen, as facts in the past tense. Frozen records, plain data, no behaviour.

Three families:

* client messages carry `pipeline`, `life` and `seq`. A name can be used again once its pipeline is over; `life`
  tells its clients apart, and only those of the present life count. Of these a message is applied only if it is
  the next one (`seq` = last applied + 1), or if it is a `StateResent` with a higher `seq`: that one carries the
  whole state and so covers whatever was lost. Everything else is late, doubled or early, and changes nothing.
* outcomes: every action ends in exactly one of `ActionDone`, `ActionFailed`, `ActionUnknown`
  (timers: `TimerFired`).
* things that happened by themselves: a process died, a node left, a client went silent.

Two more families never reach the scheduler. *Telemetry* (`EngineBusy` ... `PhaseEnded`, `MemoryUsed`) and
*samples* (`TrajectoryDropped`, `BatchTaken`) only go to the log and the monitor.
"""

import msgspec

from core.model import BatchKind, PipelineSpec, PipelineState, Priority, Role


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", omit_defaults=True, gc=False):
    """Base of all events. The log adds number, time and cause; see `core.trace`."""


class Message(Event, frozen=True, kw_only=True):
    """Base of the client messages."""

    pipeline: str
    seq: int
    life: int = 0
    """Which client of that name says it. Later clients have higher numbers."""


# --- client messages ------------------------------------------------------------------------------------


class PipelineRegistered(Message, frozen=True, kw_only=True):
    """Declares the worker groups. Again with the same spec: no effect. First message, `seq` 0, and the one that begins
    a new life once the one before is over."""

    spec: PipelineSpec


class PipelineAdmitted(Message, frozen=True, kw_only=True):
    """Asks to be admitted; memory is checked against everyone admitted. Needed before any request."""


class LeaseRequested(Message, frozen=True, kw_only=True):
    """Asks for the whole mapping of a worker group (INITIALIZATION: of the whole pipeline), or nothing."""

    request: int
    role: Role
    priority: Priority


class RequestCancelled(Message, frozen=True, kw_only=True):
    """The request is no longer wanted. If it was granted meanwhile, this releases it."""

    request: int


class LeaseReleased(Message, frozen=True, kw_only=True):
    """The worker group is offloaded: a claim, confirmed by observing memory."""

    epoch: int


class ReleasedAndRequested(Message, frozen=True, kw_only=True):
    """Release and request in one step. If the request is bad, nothing is released."""

    epoch: int
    request: int
    role: Role
    priority: Priority


class BatchOpened(Message, frozen=True, kw_only=True):
    """The pipeline wants `target` trajectories. Sent before it waits for anything."""

    batch: int
    target: int
    kind: BatchKind = BatchKind.TRAIN


class RolloutSignalled(Message, frozen=True, kw_only=True):
    """The incident's one-shot rollout request: sent once a batch. Only `signal` and `floor` listen to it."""

    batch: int


class TrajectoryCompleted(Message, frozen=True, kw_only=True):
    """A finished trajectory was accepted: the one thing that is a progress report."""

    batch: int
    delivered: int
    """Of this batch, this one included."""
    trajectory: int
    """Index within the batch."""
    attempt: int
    dp_rank: int
    """The engine that finished it."""
    segments: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens), oldest first."""


class DemandChanged(Message, frozen=True, kw_only=True):
    """Accepted trajectories were dropped again (stale: `delivered` falls) or given up (`target` falls)."""

    batch: int
    target: int
    delivered: int
    reason: str


class BatchClosed(Message, frozen=True, kw_only=True):
    """The trainer took the batch, or it was released, cancelled or failed."""

    batch: int
    reason: str


class WeightsPublished(Message, frozen=True, kw_only=True):
    """Version `version` is complete in the weight cache."""

    version: int


class RolloutReleased(Message, frozen=True, kw_only=True):
    """The pipeline gives up its rollout allocation: its engines go to sleep. Answered by `ConfirmRelease`
    once they really slept and their memory was seen free (a planned release)."""


class EngineSuspected(Message, frozen=True, kw_only=True):
    """Requests to this engine got no answer within the pipeline's limit."""

    dp_rank: int
    reason: str


class PipelineLeft(Message, frozen=True, kw_only=True):
    """The pipeline is over (`error` says why, if it failed): stop its workers, return its GPUs."""

    error: str | None = None


class StateResent(Message, frozen=True, kw_only=True):
    """A repeated message: the whole state instead of the one change."""

    state: PipelineState


# --- outcomes of actions --------------------------------------------------------------------------------


class ActionDone(Event, frozen=True, kw_only=True):
    action: int
    free: dict[int, int] = {}
    """For `AwaitMemory`: bytes observed free, by GPU."""


class ActionFailed(Event, frozen=True, kw_only=True):
    """It did not happen, or not wholly; `reason` is one line."""

    action: int
    reason: str
    free: dict[int, int] = {}


class ActionUnknown(Event, frozen=True, kw_only=True):
    """No answer within the action's limit: it may or may not have happened, or happen yet."""

    action: int
    reason: str


class TimerFired(Event, frozen=True, kw_only=True):
    timer: str
    generation: int


# --- by themselves --------------------------------------------------------------------------------------


class EngineDied(Event, frozen=True, kw_only=True):
    """The engine's process is gone; its memory may not be."""

    pipeline: str
    dp_rank: int
    reason: str


class TrainerFailed(Event, frozen=True, kw_only=True):
    pipeline: str
    reason: str


class ClientLost(Event, frozen=True, kw_only=True):
    """A pipeline's client sent no heartbeat for its limit."""

    pipeline: str
    reason: str
    life: int = 0
    """Which client of that name."""


class NodeLeft(Event, frozen=True, kw_only=True):
    node: int


# --- telemetry and samples: log and monitor only --------------------------------------------------------


class EngineBusy(Event, frozen=True, kw_only=True):
    """The engine began to decode (0 -> 1 requests running)."""

    pipeline: str
    dp_rank: int


class EngineIdle(Event, frozen=True, kw_only=True):
    """The engine stopped decoding (1 -> 0 requests running)."""

    pipeline: str
    dp_rank: int


class PhaseStarted(Event, frozen=True, kw_only=True):
    """A worker group's phase began on its GPUs: init, onload, train, log_probs, publish, offload."""

    pipeline: str
    role: Role
    phase: str
    gpus: tuple[int, ...]


class PhaseEnded(Event, frozen=True, kw_only=True):
    pipeline: str
    role: Role
    phase: str
    error: str | None = None


class MemoryUsed(Event, frozen=True, kw_only=True):
    """Observed use of a GPU (or, with `gpu` = -1 - node, of a node's host memory), by owner, in bytes."""

    gpu: int
    used: int
    capacity: int
    by: dict[str, int] = {}


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """An engine loaded a version: which way it came, and why not a faster one."""

    pipeline: str
    dp_rank: int
    version: int
    transport: str
    why: str
    meant: str
    """The way that was meant to be taken: it was not if this is another."""
    took: int
    """ns"""


class TrajectoryDropped(Event, frozen=True, kw_only=True):
    """A trajectory ended without being trained."""

    pipeline: str
    batch: int
    trajectory: int
    reason: str


class BatchTaken(Event, frozen=True, kw_only=True):
    """The trainer holding `version` took these trajectories for training."""

    pipeline: str
    batch: int
    version: int
    trajectories: tuple[int, ...]
    staleness: tuple[int, ...]
    """Versions behind, one a trajectory."""


class StepCompleted(Event, frozen=True, kw_only=True):
    """A training step is done and its weights are published."""

    pipeline: str
    step: int


class FaultInjected(Event, frozen=True, kw_only=True):
    """The simulator or a test did this on purpose."""

    kind: str
    target: str


class PipelineEnded(Event, frozen=True, kw_only=True):
    """The driver saw the pipeline end; `error` is None if all its steps are done."""

    pipeline: str
    error: str | None = None


CLIENT = (
    PipelineRegistered | PipelineAdmitted | LeaseRequested | RequestCancelled | LeaseReleased | ReleasedAndRequested
    | BatchOpened | RolloutSignalled | TrajectoryCompleted | DemandChanged | BatchClosed | WeightsPublished
    | RolloutReleased | EngineSuspected | PipelineLeft | StateResent
)  # fmt: skip
OUTCOME = ActionDone | ActionFailed | ActionUnknown | TimerFired
WORLD = EngineDied | TrainerFailed | ClientLost | NodeLeft
TELEMETRY = (
    EngineBusy | EngineIdle | PhaseStarted | PhaseEnded | MemoryUsed | WeightsLoaded | TrajectoryDropped | BatchTaken
    | StepCompleted | FaultInjected | PipelineEnded
)  # fmt: skip
AnyEvent = CLIENT | OUTCOME | WORLD | TELEMETRY
SCHEDULED = CLIENT | OUTCOME | WORLD
