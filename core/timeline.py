"""What each GPU is doing, moment by moment, from the entries: the one place that says what counts as what.

A GPU is in exactly one state at a time. States in order of precedence: lost; a trainer phase that runs on it; else what
its tenant does. `STATES` sorts them into busy, switching and idle, the three that the summary adds up.
"""

from collections.abc import Callable
from typing import NamedTuple

from core import events
from core.model import Priority, Role
from core.observed_nouns import Doing, Engine, Gpu

BUSY, SWITCHING, IDLE = "busy", "switching", "idle"

STATES: dict[str, str] = {
    "free": IDLE,
    "awake": IDLE,  # an engine that holds the GPU and decodes nothing
    "held": IDLE,  # a lease between two phases
    "lost": IDLE,
    "decoding": BUSY,
    "train": BUSY,
    "log_probs": BUSY,
    "values": BUSY,
    "publish": BUSY,
    "init": SWITCHING,
    "onload": SWITCHING,
    "offload": SWITCHING,
    "wake": SWITCHING,
    "sync": SWITCHING,
    "drain": SWITCHING,  # closing, some requests still decode
    "sleep": SWITCHING,
    "kill": SWITCHING,
    "release": SWITCHING,  # let go, memory not yet seen free
    "quarantine": SWITCHING,
}

_ENGINE_STATES = {
    Doing.ASLEEP: "release",
    Doing.WAKING: "wake",
    Doing.AWAKE: "awake",
    Doing.SYNCING: "sync",
    Doing.SERVING: "awake",
    Doing.FALLING_ASLEEP: "sleep",
    Doing.BEING_KILLED: "kill",
    Doing.DEAD: "release",
}


class Segment(NamedTuple):
    """A GPU in one state, for one pipeline ("" for nobody), from `start` to `end` (ns)."""

    gpu: int
    start: int
    end: int
    state: str
    pipeline: str


SegmentSink = Callable[[Segment], None]


class Timeline:
    """Turns changes into segments. Equal neighbours are one segment; empty ones do not exist."""

    def __init__(self, gpus: list[Gpu], sink: SegmentSink) -> None:
        self._gpus = gpus
        self._sink = sink
        self._now: list[tuple[str, str, int]] = [("free", "", 0)] * len(gpus)
        """State, pipeline and beginning of each GPU's open segment."""
        self._pending: list[tuple[str, str]] = [("free", "")] * len(gpus)
        self._phases: dict[int, str] = {}
        self._running: dict[tuple[str, Role], tuple[int, ...]] = {}

    def phase_started(self, event: events.PhaseStarted, now_ns: int) -> None:
        gpus = tuple(gpu for gpu in event.gpus if 0 <= gpu < len(self._gpus))
        self._running[(event.pipeline, event.role)] = gpus
        for gpu in gpus:
            self._phases[gpu] = event.phase
            self.update(self._gpus[gpu], now_ns)

    def phase_ended(self, event: events.PhaseEnded, now_ns: int) -> None:
        for gpu in self._running.pop((event.pipeline, event.role), ()):
            self._phases.pop(gpu, None)
            self.update(self._gpus[gpu], now_ns)

    def update(self, gpu: Gpu, now_ns: int) -> None:
        """The GPU, its tenant or its phase may have changed."""
        state, pipeline = self._state(gpu)
        before, whose, since = self._now[gpu.id]
        if state == before and pipeline == whose:
            return
        if now_ns > since:
            self._sink(Segment(gpu.id, since, now_ns, before, whose))
            self._now[gpu.id] = (state, pipeline, now_ns)
        else:
            self._now[gpu.id] = (state, pipeline, since)

    def finish(self, now_ns: int) -> None:
        """End the open segments."""
        for gpu, (state, pipeline, since) in enumerate(self._now):
            if now_ns > since:
                self._sink(Segment(gpu, since, now_ns, state, pipeline))
                self._now[gpu] = (state, pipeline, now_ns)

    def _state(self, gpu: Gpu) -> tuple[str, str]:
        tenant = gpu.tenant
        if gpu.lost:
            return "lost", ""
        if tenant is None:
            self._phases.pop(gpu.id, None)  # a trainer that died never said that its phase ended
            return "free", ""
        if gpu.quarantined:
            return "quarantine", tenant.pipeline.id
        if gpu.claimed:
            return "release", tenant.pipeline.id
        if isinstance(tenant, Engine):
            return _engine_state(tenant), tenant.pipeline.id
        phase = self._phases.get(gpu.id)
        held = "init" if tenant.priority is Priority.INITIALIZATION else "held"
        return phase if phase in STATES else held, tenant.pipeline.id


def _engine_state(engine: Engine) -> str:
    if engine.busy and engine.doing in (Doing.AWAKE, Doing.SERVING):
        return "decoding"
    if engine.busy and engine.doing is Doing.FALLING_ASLEEP:
        return "drain"
    return _ENGINE_STATES[engine.doing]
