"""A failure as a small file: the case, what was found, and the digest of its log. `tests/seeds/*.json` are such files.

1. It holds draws, not seeds to draw from: it means the same when the drawing changes.
2. `expect` says what a replay should show: the finding of an open failure, or nothing, once it is fixed.
3. The digest is that of the run when the file was written. A replay with another digest and the same finding is
   *stale*: it still shows something, but no longer what was recorded. (After a fix it always is.)
"""

import hashlib
from pathlib import Path

import msgspec

from backends.sim.explore.case import Case, Finding
from backends.sim.explore.judge import Judgement, Trial
from core.errors import ConfigError
from core.model import Record
from core.monitor import Monitor
from core.trace import Entry, Log
from core.units import show_s
from core.waits import explain as explain_waits

SCHEMA = 1
ENTRIES_SHOWN = 30
LONGEST_ENTRY = 240


class Artefact(Record, frozen=True, kw_only=True):
    schema: int = SCHEMA
    about: str = ""
    """One line for people: what it was, and what fixed it."""
    case: Case
    expect: Finding | None = None
    """None: a replay finds nothing (it is fixed)."""
    digest: str = ""
    """sha256 over the entries of its log, when it was written."""


class Replay:
    """A case run once more, with its whole log."""

    def __init__(self, case: Case) -> None:
        self.log = Log()
        self._where = Where(case)
        self.judgement: Judgement = self._where.trial.run([self._where, self.log])

    @property
    def digest(self) -> str:
        return digest(self.log)

    def story(self) -> str:
        """The rule, the last entries before it broke, and who waited for whom then."""
        found = self.judgement.finding
        if found is None:
            return "nothing was found"
        at_the_end = (len(self.log.entries) - 1, self._where.explained())
        at, waits = self._where.broken.get((found.rule, found.text), at_the_end)
        shown = list(self.log.entries)[max(0, at - ENTRIES_SHOWN + 1) : at + 1]
        lines = [f"{found.rule} ({found.outcome}) at {show_s(found.at_ns)}: {found.text}", "", "the log up to there:"]
        return "\n".join([*lines, *(f"  {show(entry)}" for entry in shown), "", "who waits then:", _indented(waits)])


class Where:
    """A listener with a monitor of its own: at which entry each rule broke, and who waited for whom then."""

    def __init__(self, case: Case) -> None:
        scenario = case.scenario
        self.trial = Trial(case, thorough=False)
        self.broken: dict[tuple[str, str], tuple[int, str]] = {}
        """(rule, detail) -> (entry, waits)."""
        self._monitor = Monitor(scenario.cluster, scenario.demand, scenario.driver)

    def __call__(self, i: int, t_ns: int, cause: int, item: object) -> None:
        known = len(self._monitor.violations)
        self._monitor(i, t_ns, cause, item)
        for violation in self._monitor.violations[known:]:
            self.broken.setdefault((violation.rule, violation.detail), (i, self.explained()))

    def explained(self) -> str:
        service = self.trial.service
        return explain_waits(service.state) if service is not None else ""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def show(entry: Entry) -> str:
    """One entry on one line: number, time, cause, what."""
    fields = msgspec.to_builtins(entry.item)
    kind = fields.pop("type", type(entry.item).__name__)
    told = ", ".join(f"{key}={value}" for key, value in fields.items())
    line = f"{entry.i:>6} {show_s(entry.t):>12}  {kind}({told})" + (f"  <- {entry.cause}" if entry.cause >= 0 else "")
    return line if len(line) <= LONGEST_ENTRY else f"{line[: LONGEST_ENTRY - 3]}..."


def digest(log: Log) -> str:
    """sha256 over the entries, as they would be written."""
    return hashlib.sha256(msgspec.json.Encoder().encode_lines(log.entries)).hexdigest()


# --- files ------------------------------------------------------------------------------------------------


def save(artefact: Artefact, folder: Path, name: str) -> Path:
    """Write it under a name that is free. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(artefact), indent=1) + b"\n")
    except OSError as failed:
        raise ConfigError(str(folder), f"cannot be written: {failed.strerror}") from failed
    return path


def load(path: Path) -> Artefact:
    """Raises ConfigError if it is no artefact of this version."""
    try:
        text = path.read_bytes()
    except OSError as failed:
        raise ConfigError(str(path), f"cannot be read: {failed.strerror}") from failed
    try:
        found = msgspec.json.decode(text, type=Artefact)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(str(path), f"is no saved failure: {wrong}", "the explorer writes them") from wrong
    if found.schema != SCHEMA:
        raise ConfigError(str(path), f"schema {found.schema}; this version reads {SCHEMA}")
    return found
