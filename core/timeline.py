"""What each GPU is doing, moment by moment, from the entries: the one place that says what counts as what.

A GPU is in exactly one state at a time: lost, free, in quarantine, or what its tenant does there. `STATES` sorts them
into busy, switching and idle, the three that the summary adds up.
"""

from collections.abc import Callable

import msgspec

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


class Segment(msgspec.Struct, frozen=True, gc=False):
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
        self._open: list[tuple[tuple[str, str], int]] = [(("free", ""), 0)] * len(gpus)
        """The segment to be emitted next, of each GPU: (state, pipeline), beginning."""
        self._current = list(self._open)
        """What came after it, if it turns out to last longer than an instant."""
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
        new = self._state(gpu)
        current, at = self._current[gpu.id]
        if new != current:
            if now_ns > at:
                self._lasted(gpu.id, current, at)
            self._current[gpu.id] = (new, now_ns)

    def finish(self, now_ns: int) -> None:
        """End the open segments."""
        for gpu, (current, at) in enumerate(self._current):
            if now_ns > at:
                self._lasted(gpu, current, at)
            state, since = self._open[gpu]
            if now_ns > since:
                self._sink(Segment(gpu, since, now_ns, *state))
                self._open[gpu] = (current, now_ns)

    def _lasted(self, gpu: int, state: tuple[str, str], at: int) -> None:
        before, since = self._open[gpu]
        if state != before:
            if at > since:
                self._sink(Segment(gpu, since, at, *before))
            self._open[gpu] = (state, at)

    def _state(self, gpu: Gpu) -> tuple[str, str]:
        tenant = gpu.tenant
        if gpu.lost:
            return "lost", ""
        if tenant is None:
            self._phases.pop(gpu.id, None)  # a trainer that died never said that its phase ended
            return ("quarantine" if gpu.quarantined else "free"), ""
        if gpu.quarantined:
            return "quarantine", tenant.pipeline.id
        if gpu.claimed:
            return "release", tenant.pipeline.id
        if isinstance(tenant, Engine):
            return _engine_state(tenant), tenant.pipeline.id
        phase = self._phases.get(gpu.id, "")
        if tenant.priority is Priority.INITIALIZATION:
            return "init", tenant.pipeline.id
        return phase if phase in STATES else "held", tenant.pipeline.id


def _engine_state(engine: Engine) -> str:
    if engine.busy and engine.doing in (Doing.AWAKE, Doing.SERVING):
        return "decoding"
    if engine.busy and engine.doing is Doing.FALLING_ASLEEP:
        return "drain"
    return _ENGINE_STATES[engine.doing]
