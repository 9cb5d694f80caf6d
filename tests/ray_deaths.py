"""Killing a process in the middle of what it does: which phase is under way is read from the journal, never guessed.

1. A victim is frozen first (SIGSTOP). What is frozen ends nothing, so if the journal shows the phase as under way after
   that, the process is in the middle of it, and is killed there. If the end was on its way already, the victim is
   thawed and the next such phase is waited for.
2. The journal is held open: it can be read to its last entry, also when the control plane has removed it.
3. The model of these pipelines is large enough that no phase is over before it can be seen.
"""

import json
import os
import random
import signal
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from ray_world import until

from backends.ray_gpu.models import tiny
from backends.ray_gpu.models.byte_tokenizer import VOCAB_SIZE, write_tokenizer
from core import actions, events
from core.ledger import Hold
from core.scheduler import State, decide, new_state
from core.trace import Entry, Header

PAUSE_S = 0.002
"""Between two looks at the journal: well below the length of a phase."""
ON_ITS_WAY_S = 0.3
"""How long the end of a phase may still be on its way into the journal when the process that was in it is frozen."""

ENGINE_PHASES = {actions.SyncEngine: "sync", actions.SleepEngine: "sleep"}


class Doing(NamedTuple):
    """Something that takes its time. `what`: a phase of a trainer (init, onload, train, publish, offload), of an engine
    (start, wake, sync, generate, sleep), or `wait`, for a lease."""

    pipeline: str
    what: str


class Diary:
    """A journal as it grows: what is under way by its last entry, and what the scheduler knows by then."""

    def __init__(self, journal: Path) -> None:
        self._file = journal.open("rb")
        self._decoder = msgspec.json.Decoder(Entry)
        header = msgspec.json.decode(self._file.readline(), type=Header)
        self.state = new_state(header.config.cluster, header.demand)
        """The scheduler's: everything is decided again."""
        self.under_way: dict[Doing, int] = {}
        """With the number of the entry that began it."""
        self._running: dict[int, Doing] = {}
        """Engines' operations by their action."""
        self.entries: list[Entry] = []

    def look(self) -> None:
        """Read on. A line that is not whole yet, or will be cut off by the next control plane, is left."""
        while True:
            at = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(at)
                return
            entry = self._decoder.decode(line)
            self.entries.append(entry)
            if isinstance(entry.item, events.SCHEDULED):
                decide(self.state, entry.t, entry.item)
            self._take(entry.i, entry.item)

    def _take(self, i: int, item: Any) -> None:
        match item:
            case events.PhaseStarted():
                self._begin(i, item.pipeline, item.phase)
            case events.PhaseEnded():
                self._end(item.pipeline, item.phase)
            case events.LeaseRequested() | events.ReleasedAndRequested():
                self._begin(i, item.pipeline, "wait")
            case actions.GrantLease():
                self._end(item.pipeline, "wait")
            case events.EngineBusy():
                self._begin(i, item.pipeline, "generate")
            case events.EngineIdle():
                self._end(item.pipeline, "generate")
            case actions.WakeEngine() | actions.SyncEngine() | actions.SleepEngine():
                what = ENGINE_PHASES.get(type(item)) or ("start" if item.cold else "wake")
                self._running[item.action] = Doing(item.pipeline, what)
                self._begin(i, item.pipeline, what)
            case events.ActionDone() | events.ActionFailed() | events.ActionUnknown():
                doing = self._running.pop(item.action, None)
                if doing is not None:
                    self._end(*doing)
            case events.PipelineLeft() | events.ClientLost() | actions.FailPipeline():
                self.under_way = {doing: i for doing, i in self.under_way.items() if doing.pipeline != item.pipeline}

    def _begin(self, i: int, pipeline: str, what: str) -> None:
        self.under_way[Doing(pipeline, what)] = i

    def _end(self, pipeline: str, what: str) -> None:
        self.under_way.pop(Doing(pipeline, what), None)

    def count(self, type_: type, **fields: Any) -> int:
        """Items of that type that have these fields."""
        self.look()
        items = (entry.item for entry in self.entries)
        return sum(type(one) is type_ and all(getattr(one, k) == v for k, v in fields.items()) for one in items)

    def trouble(self, pipeline: str, after: int) -> str:
        """The first thing that went wrong with a pipeline after so many entries, in words; empty if nothing did."""
        for entry in self.entries[after:]:
            match entry.item:
                case events.EngineDied() | events.TrainerFailed() | events.ClientLost() as died:
                    whose, text = died.pipeline, died.reason
                case actions.Note(kind="quarantine" | "failed") as note:
                    whose, text = note.pipeline, note.text
                case events.PhaseEnded(error=str(text)) as ended:
                    whose = ended.pipeline
                case _:
                    continue
            if whose == pipeline:
                return text
        return ""

    def over(self, pipeline: str) -> bool:
        """Whether a pipeline has ended, its workers are stopped and their memory was seen back."""
        self.look()
        book = self.state.ledger.books.get(pipeline)
        return book is not None and not book.alive and book.stop < 0 and not book.clearing

    def close(self) -> None:
        self._file.close()


def kill_while(diary: Diary, doing: Doing, victim: Callable[[], int], hopeless: Callable[[], bool]) -> None:
    """Kill a process (`victim` tells its pid, 0 for none yet) in the middle of something that begins from now on, or
    has just begun. Raises AssertionError once that is `hopeless`."""

    def begun() -> tuple[int, int] | None:
        diary.look()
        pid = victim() if doing in diary.under_way else 0
        assert pid or not hopeless(), f"{doing} did not come any more"
        return (diary.under_way[doing], pid) if pid else None

    while True:
        entry, pid = until(begun, f"{doing.what} of {doing.pipeline}", pause_s=PAUSE_S)
        os.kill(pid, signal.SIGSTOP)
        if _still(diary, doing, entry):
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGCONT)


def _still(diary: Diary, doing: Doing, entry: int) -> bool:
    """Whether it goes on, now that whoever does it is frozen."""
    end = time.monotonic() + ON_ITS_WAY_S
    while time.monotonic() < end:
        diary.look()
        if diary.under_way.get(doing) != entry:
            return False
        time.sleep(PAUSE_S)
    return True


def nobody_holds_anything(state: State) -> list[str]:
    """What is left in the scheduler's books; empty if nothing is."""
    ledger = state.ledger
    held = [f"GPU {gpu.id} is {gpu.hold.value} ({gpu.why})" for gpu in ledger.gpus if gpu.hold is not Hold.FREE]
    asked = [f"{action} has no outcome" for action, _ in state.operations.values()]
    return [*held, *asked, *map(str, ledger.leases.values()), *map(str, ledger.waiting)]


# --- a model whose phases take their time ------------------------------------------------------------------------

HIDDEN, FEED_FORWARD, LAYERS = 320, 1280, 6
"""10 million parameters: 40 MB to publish and to sync, 160 MB to onload."""
BLOCK = 1 << 16


def make_model(folder: Path) -> Path:
    """A Llama like `tiny`, but larger. Written without torch, whose import takes seconds."""
    folder.mkdir()
    config = tiny.config() | {
        "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS,
        "head_dim": HIDDEN // tiny.HEADS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    _write_weights(folder / "model.safetensors")
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // tiny.HEADS * tiny.KV_HEADS
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN), "mlp.down_proj": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    ends = {"model.embed_tokens": (VOCAB_SIZE, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB_SIZE, HIDDEN)}
    layers = {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (ends | layers).items()}


def _write_weights(file: Path) -> None:
    """A safetensors file: the length of a JSON header, the header, the bytes."""
    chance = random.Random(0)
    block = array("f", (chance.gauss(0, 0.02) for _ in range(BLOCK))).tobytes()
    ones = array("f", [1.0] * HIDDEN).tobytes()
    header, at = {}, 0
    sizes = {name: 4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in _shapes().items()}
    for name, shape in _shapes().items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    head = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, shape in _shapes().items():
            data = ones if len(shape) == 1 else block * (sizes[name] // len(block) + 1)
            out.write(data[: sizes[name]])
