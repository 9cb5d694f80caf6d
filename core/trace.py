"""The event log: one JSON object a line; its writer, its reader, and replay through `decide`.

1. Line 1 is the header: the whole scenario, so that a log explains and replays itself. No wall clock, no paths:
   the same run gives the same bytes.
2. Then one line an entry, in order: `{"i", "t", "cause", "item"}`. `i` counts from 0, `t` is ns since the run
   began, `cause` the number of the entry that led to it (-1: none), `item` an event, action, note or verdict.
3. After every 1,000 entries, and at the end, a checkpoint line: how many entries so far and the sha256 over all
   their lines. It rolls, so once two logs differ every later checkpoint differs too: bisect, then compare one block.
   The header is left out of it: two Python versions may differ there and must not differ anywhere else.
4. A log is frozen by its first `Verdict`; entries after that are not written.
5. Nothing here judges or counts; `core.monitor` and `core.accounting` do, from the same entries.
"""

import hashlib
import platform
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Protocol

import msgspec

from core import actions, events
from core.config import Scenario
from core.errors import ConfigError
from core.model import DemandPolicy

SCHEMA = 1
CHECKPOINT_EVERY = 1_000

Outcome = Literal["completed", "failed", "deadlock", "starved", "interrupted"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", omit_defaults=True):
    """How the run ended. The first one wins: log, monitor and accounting freeze there."""

    outcome: Outcome
    rule: str = ""
    """The guarantee that was broken: `L1`, `L2`, `L3`; empty if none."""
    text: str = ""


class Violation(msgspec.Struct, frozen=True):
    """A guarantee that did not hold, at `at_ns`."""

    rule: str
    at_ns: int
    detail: str


Item = events.AnyEvent | actions.AnyAction | actions.Note | Verdict


class Entry(msgspec.Struct, frozen=True, gc=False):
    i: int
    t: int
    """ns since the run began."""
    cause: int
    item: Item


class Header(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    scenario: str
    backend: str
    demand: DemandPolicy
    seed: int
    config: Scenario
    python: str
    turnstile: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    checkpoint: int
    """How many entries came before."""
    sha256: str
    final: bool = False
    """The writer was closed properly: nothing follows."""


class Listener(Protocol):
    """Called for every entry, in order: trace writer, monitor, accounting, live view."""

    def __call__(self, i: int, t_ns: int, cause: int, item: Item, /) -> None: ...


def header_of(scenario: Scenario, backend: str) -> Header:
    return Header(
        schema=SCHEMA, scenario=scenario.name, backend=backend, demand=scenario.demand, seed=scenario.seed,
        config=scenario, python=platform.python_version(), turnstile=own_version(),
    )  # fmt: skip


@cache
def own_version() -> str:
    try:
        return version("turnstile")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


# --- writing --------------------------------------------------------------------------------------------


class TraceWriter:
    """Streams a log to a file. Encodes and hashes a block of entries at a time: about 1 µs an entry.

    A full disk must not stop the run: writing then ends, and `error` says why.
    """

    def __init__(self, target: str | Path | BinaryIO, header: Header) -> None:
        """Raises ConfigError if the file cannot be created."""
        self.error: OSError | None = None
        self.checkpoints: list[str] = []
        self._owned = isinstance(target, str | Path)
        self._file = _create(target) if isinstance(target, str | Path) else target
        self._encoder = msgspec.json.Encoder()
        self._sha = hashlib.sha256()
        self._block: list[Entry] = []
        self._written = 0
        self._till_checkpoint = CHECKPOINT_EVERY
        self._frozen = False
        self._closed = False
        self._write(self._encoder.encode(header) + b"\n")

    def __call__(self, i: int, t_ns: int, cause: int, item: Item) -> None:
        if self._frozen:
            return
        self._block.append(Entry(i, t_ns, cause, item))
        self._frozen = type(item) is Verdict
        self._till_checkpoint -= 1
        if not self._till_checkpoint:
            self._flush_block()
            self._checkpoint(final=False)
            self._till_checkpoint = CHECKPOINT_EVERY

    @property
    def digest(self) -> str:
        """sha256 (hex) over all entry lines so far."""
        self._flush_block()
        return self._sha.hexdigest()

    def flush(self) -> None:
        """Hand everything so far to the operating system; changes no byte of the log."""
        self._flush_block()
        if not self.error and not self._closed:
            self._file.flush()

    def close(self) -> None:
        """Write the closing checkpoint. Twice is once."""
        if self._closed:
            return
        self._flush_block()
        self._checkpoint(final=True)
        self._frozen = self._closed = True
        try:
            self._file.close() if self._owned else self._file.flush()
        except OSError as failed:
            self.error = self.error or failed

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _flush_block(self) -> None:
        if self._block:
            lines = self._encoder.encode_lines(self._block)
            self._written += len(self._block)
            self._block.clear()
            self._sha.update(lines)
            self._write(lines)

    def _checkpoint(self, final: bool) -> None:
        self.checkpoints.append(self._sha.hexdigest())
        line = Checkpoint(checkpoint=self._written, sha256=self.checkpoints[-1], final=final)
        self._write(self._encoder.encode(line) + b"\n")

    def _write(self, data: bytes) -> None:
        if self.error:
            return
        try:
            self._file.write(data)
        except OSError as failed:
            self.error = failed


def _create(path: str | Path) -> BinaryIO:
    try:
        return open(path, "wb", buffering=1 << 20)
    except OSError as failed:
        raise ConfigError(str(path), f"the log cannot be written here: {failed.strerror}") from failed


class Log:
    """Keeps entries in memory, the last `limit` of them if one is given."""

    def __init__(self, limit: int | None = None) -> None:
        self.entries: deque[Entry] = deque(maxlen=limit)
        self.verdict: Verdict | None = None

    def __call__(self, i: int, t_ns: int, cause: int, item: Item) -> None:
        if self.verdict is None:
            self.entries.append(Entry(i, t_ns, cause, item))
            if type(item) is Verdict:
                self.verdict = item

    def items(self, kind: type | tuple[type, ...] = object) -> list[Item]:
        """The items of a class, in order."""
        return [entry.item for entry in self.entries if isinstance(entry.item, kind)]


def feed(entries: Iterable[Entry], *listeners: Listener) -> None:
    """Give recorded entries to listeners as the service would have."""
    for entry in entries:
        for listener in listeners:
            listener(entry.i, entry.t, entry.cause, entry.item)


# --- reading --------------------------------------------------------------------------------------------


class LogEntries:
    """The entries of a log file, one after another. `truncated` says, once they are used up, whether the end is
    missing (the writer was killed); up to there everything is sound and checked against the checkpoints."""

    def __init__(self, path: str | Path, file: BinaryIO) -> None:
        self.truncated = ""
        self._path = path
        self._file = file
        self._entry = msgspec.json.Decoder(Entry)
        self._check = msgspec.json.Decoder(Checkpoint)

    def __iter__(self) -> Iterator[Entry]:
        sha, count, final = hashlib.sha256(), 0, False
        with self._file:
            for number, line in enumerate(self._file, 2):
                if final:
                    raise self._broken(number, "something follows the closing line")
                if not line.endswith(b"\n"):
                    self.truncated = f"line {number} is cut off: the writer was killed after entry {count - 1}"
                    return
                if line.startswith(b'{"checkpoint"'):
                    final = self._verify(number, line, count, sha.hexdigest())
                    continue
                entry = self._decode(number, line)
                if entry.i != count:
                    raise self._broken(number, f"entry {entry.i} where entry {count} should be; lines are missing")
                sha.update(line)
                count += 1
                yield entry
        if not final:
            self.truncated = f"no closing line: the writer was killed after entry {count - 1}"

    def _decode(self, number: int, line: bytes) -> Entry:
        try:
            return self._entry.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            raise self._broken(number, f"not an entry of a log: {wrong}") from wrong

    def _verify(self, number: int, line: bytes, count: int, digest: str) -> bool:
        try:
            check = self._check.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            raise self._broken(number, f"not a checkpoint: {wrong}") from wrong
        if (check.checkpoint, check.sha256) != (count, digest):
            raise self._broken(number, f"the {count} entries above are not those that were written")
        return check.final

    def _broken(self, number: int, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{number}", problem, "record the log again")


def read_log(path: str | Path) -> tuple[Header, LogEntries]:
    """A log file's header and its entries, read lazily and once.

    Raises ConfigError, naming file and line: here if the file is not a log, while iterating if it is damaged.
    """
    try:
        file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115  closed by whoever iterates
        line = file.readline()
    except OSError as failed:
        raise ConfigError(str(path), f"cannot be read: {failed.strerror}") from failed
    try:
        return _header(path, line), LogEntries(path, file)
    except ConfigError:
        file.close()
        raise


def _header(path: str | Path, line: bytes) -> Header:
    where = f"{path}:1"
    if not line.endswith(b"\n"):
        raise ConfigError(where, "the file ends before its header does" if line else "the file is empty")
    try:
        schema = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).get("schema")
        if schema is not None and bytes(schema) != b"%d" % SCHEMA:
            raise ConfigError(where, f"a log of schema {bytes(schema).decode()}; this version reads {SCHEMA}")
        return msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(where, f"not the header of a Turnstile log: {wrong}", "see --trace FILE") from wrong


def first_difference(one: Iterable[Entry], other: Iterable[Entry]) -> int | None:
    """Number of the first entry in which two logs differ (or that only one has); None if they are equal."""
    for a, b in zip_longest(one, other):
        if a != b:
            return (a or b).i
    return None


# --- replay ---------------------------------------------------------------------------------------------


class Divergence(msgspec.Struct, frozen=True):
    """Where replay first departs from the record. None: there was no action to set against the other one."""

    entry: int
    recorded: actions.Action | None
    replayed: actions.Action | None

    def __str__(self) -> str:
        return f"at entry {self.entry} the log has {self.recorded}, decide gives {self.replayed}"


class Decided(Protocol):
    """What replay reads of a decision."""

    @property
    def actions(self) -> Iterable[actions.Action]: ...


Decider = Callable[[int, events.SCHEDULED], Decided]


def replay(header: Header, entries: Iterable[Entry], decider: Decider | None = None) -> Divergence | None:
    """Feed the recorded events through `decide` and compare its actions with the recorded ones.

    Returns the first divergence. `decider` stands in for a fresh scheduler in tests. A log that ends, by a
    verdict or a kill, between a decision and the last of its actions is no divergence.
    """
    decide = decider or _fresh_scheduler(header)
    due: deque[actions.Action] = deque()
    for entry in entries:
        if isinstance(entry.item, events.SCHEDULED):
            if due:
                return Divergence(entry.i, None, due[0])
            due.extend(decide(entry.t, entry.item).actions)
        elif isinstance(entry.item, actions.AnyAction):
            replayed = due.popleft() if due else None
            if replayed != entry.item:
                return Divergence(entry.i, entry.item, replayed)
    return None


def _fresh_scheduler(header: Header) -> Decider:
    from core.scheduler import decide, new_state  # here, so that reading a log needs no scheduler

    state = new_state(header.config.cluster, header.demand)
    return lambda now_ns, event: decide(state, now_ns, event)
