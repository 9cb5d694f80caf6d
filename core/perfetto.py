"""A log as a trace for ui.perfetto.dev (Chrome's trace-event JSON): what every GPU and every pipeline did when.

Process 1 has a track a GPU: who held it and what for. Each pipeline is a process of its own with a track for its phases
and one for each engine's decoding; what went wrong and what was decided are marks on it. For looking at only: nothing
is ever computed from it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from core import actions, events
from core.config import Scenario
from core.errors import ConfigError
from core.observed import Observed
from core.observed_nouns import Engine, Gpu, Watcher
from core.timeline import Segment, Timeline
from core.trace import Entry, Header, Verdict, feed

GPUS = 1
"""Process number of the GPUs; pipelines follow."""
PHASES = 0
"""Thread number of a pipeline's phases; engine r is 1 + r."""
MARKS = ("rollout_granted", "init_accepted", "quarantine", "residue_growth", "degraded", "failed")


class PerfettoWriter(Watcher):
    """A listener that streams the trace to a file; `close` (or leaving the context) completes it.

    A full disk must not stop the run: writing then ends, and `error` says why.
    """

    def __init__(self, path: str | Path, scenario: Scenario) -> None:
        """Raises ConfigError if the file cannot be created."""
        self.error: OSError | None = None
        try:
            self._file = open(path, "w", encoding="utf-8", buffering=1 << 20)  # noqa: SIM115  closed by `close`
        except OSError as failed:
            raise ConfigError(str(path), f"the trace cannot be written here: {failed.strerror}") from failed
        self._observed = Observed(scenario.cluster, self)
        self._timeline = Timeline(self._observed.gpus, self._segment)
        self._process = {job.spec.id: GPUS + 1 + number for number, job in enumerate(scenario.jobs)}
        self._began: dict[tuple[int, int], tuple[str, int]] = {}
        self._separator = '{"traceEvents":[\n'
        self._frozen = False
        self._name(scenario)

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        if self._frozen:
            return
        self._observed.apply(i, t_ns, cause, item)
        match item:
            case events.PhaseStarted():
                self._timeline.phase_started(item, t_ns)
                self._begin(item.pipeline, PHASES, f"{item.role.value} {item.phase}")
            case events.PhaseEnded():
                self._timeline.phase_ended(item, t_ns)
                self._end(item.pipeline, PHASES)
            case events.EngineBusy():
                self._begin(item.pipeline, 1 + item.dp_rank, "decoding")
            case events.EngineIdle():
                self._end(item.pipeline, 1 + item.dp_rank)
            case actions.Note() if item.kind in MARKS:
                self._mark(item.pipeline, f"{item.kind}: {item.text}")
            case events.EngineDied() | events.TrainerFailed() | events.ClientLost():
                self._mark(item.pipeline, f"{type(item).__name__}: {item.reason}")
            case events.PipelineEnded():
                self._mark(item.pipeline, f"ended: {item.error or 'all steps done'}")
            case Verdict():
                self._mark("", f"{item.outcome} {item.text}".strip())
                self._frozen = True

    def close(self) -> None:
        """Complete the file. Twice is once."""
        if self._file.closed:
            return
        self._frozen = True
        self._timeline.finish(self._observed.now)
        for process, thread in tuple(self._began):
            self._complete(process, thread)
        self._write("\n]}\n" if self._separator == ",\n" else '{"traceEvents":[]}\n')
        try:
            self._file.close()
        except OSError as failed:
            self.error = self.error or failed

    def __enter__(self) -> "PerfettoWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- changes ---------------------------------------------------------------------------------------

    def gpu_changed(self, gpu: Gpu) -> None:
        self._timeline.update(gpu, self._observed.now)

    def engine_changed(self, engine: Engine) -> None:
        for gpu in engine.gpus:
            self._timeline.update(self._observed.gpus[gpu], self._observed.now)

    def _segment(self, segment: Segment) -> None:
        if segment.state != "free":
            name = f"{segment.pipeline} {segment.state}".strip()
            self._emit_span(GPUS, segment.gpu, name, segment.start, segment.end)

    def _begin(self, pipeline: str, thread: int, name: str) -> None:
        process = self._process.get(pipeline, 0)
        self._complete(process, thread)
        self._began[(process, thread)] = (name, self._observed.now)

    def _end(self, pipeline: str, thread: int) -> None:
        self._complete(self._process.get(pipeline, 0), thread)

    def _complete(self, process: int, thread: int) -> None:
        began = self._began.pop((process, thread), None)
        if began is not None:
            self._emit_span(process, thread, began[0], began[1], self._observed.now)

    # --- the format ------------------------------------------------------------------------------------

    def _name(self, scenario: Scenario) -> None:
        self._emit_name("process_name", GPUS, 0, "GPUs")
        for gpu in range(scenario.cluster.gpus):
            self._emit_name("thread_name", GPUS, gpu, f"GPU {gpu}")
        for job in scenario.jobs:
            process = self._process[job.spec.id]
            self._emit_name("process_name", process, 0, job.spec.id)
            self._emit_name("thread_name", process, PHASES, "phases")
            for rank in range(job.spec.infer.size):
                self._emit_name("thread_name", process, 1 + rank, f"engine {rank}")

    def _emit_name(self, kind: str, process: int, thread: int, name: str) -> None:
        self._emit({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})

    def _emit_span(self, process: int, thread: int, name: str, start: int, end: int) -> None:
        times = {"ts": start / 1000, "dur": (end - start) / 1000}  # the format counts microseconds
        self._emit({"ph": "X", "name": name, "pid": process, "tid": thread, **times})

    def _mark(self, pipeline: str, name: str) -> None:
        process = self._process.get(pipeline, GPUS)
        self._emit({"ph": "i", "s": "p", "name": name, "pid": process, "tid": 0, "ts": self._observed.now / 1000})

    def _emit(self, event: dict[str, Any]) -> None:
        self._write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"

    def _write(self, text: str) -> None:
        if self.error is not None:
            return
        try:
            self._file.write(text)
        except OSError as failed:
            self.error = failed


def export_perfetto(header: Header, entries: Iterable[Entry], path: str | Path) -> None:
    """Write a recorded log as a Perfetto trace. Raises ConfigError if it cannot be written to its end."""
    with PerfettoWriter(path, header.config) as writer:
        feed(entries, writer)
    if writer.error is not None:
        raise ConfigError(str(path), f"could not be written: {writer.error.strerror}") from writer.error
