"""What came of it: kept in a file after every detector, so that a run can be stopped and taken up; and as a page."""

import hashlib
import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from tests.mutants.detectors import DETECTORS, DIED, SEEDS, Found
from tests.mutants.tree import Mutant

BASELINE = "(none)"

Row = dict[str, Found]


class Results:
    """By mutant and detector. A mutant whose text has changed has no results, and the unchanged packages have none
    once anything in them or in the tests is another: a test that fails by itself would find every mutant."""

    def __init__(self, file: Path | None = None, tree: str = "") -> None:
        """`tree`: the digest of the unchanged packages."""
        self._file = file
        self._tree = tree
        self._rows: dict[str, Row] = {}
        if file is not None and file.exists():
            for name, row in json.loads(file.read_text(encoding="utf-8")).items():
                self._rows[name] = {detector: Found(**found) for detector, found in row.items()}

    def of(self, mutant: Mutant | None) -> Row:
        return self._rows.setdefault(self._key(mutant), {})

    def put(self, mutant: Mutant | None, detector: str, found: Found) -> None:
        self.of(mutant)[detector] = found
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            told = {
                name: {detector: found._asdict() for detector, found in row.items()} for name, row in self._rows.items()
            }
            self._file.write_text(json.dumps(told, indent=1), encoding="utf-8")

    def _key(self, mutant: Mutant | None) -> str:
        if mutant is None:
            return f"{BASELINE} {self._tree}"
        text = hashlib.sha256("\0".join((mutant.file, mutant.old, mutant.new)).encode()).hexdigest()[:8]
        return f"{mutant.name} {text}"


# --- the table --------------------------------------------------------------------------------------------


def cell(detector: str, found: Found | None) -> str:
    if found is None:
        return "?"
    if found.blind:
        return "blind"
    if detector == "explorer" and found.seeds:
        return f"{found.hits}/{found.seeds} {found.how}".strip()
    if not found.found:
        return "-"
    if detector == "verifier" or found.how.startswith(("hung", DIED)):
        return found.how.partition(":")[0]
    return "yes"


def holes(mutants: Iterable[Mutant], results: Results) -> list[str]:
    """Mutants that every detector has looked at and none has found."""
    return [
        mutant.name
        for mutant in mutants
        if len(row := results.of(mutant)) == len(DETECTORS) and not any(found.found for found in row.values())
    ]


def unjudged(mutants: Iterable[Mutant], results: Results) -> list[str]:
    """Mutants that nobody has found so far, and not every detector has looked at."""
    return [
        mutant.name
        for mutant in mutants
        if len(row := results.of(mutant)) < len(DETECTORS) and not any(found.found for found in row.values())
    ]


HEAD = """\
# Mutants

The tester is tested: each line is a fault put into a copy of the packages on purpose (`tests/mutants/table.py`), and
what found it. Made by `python -m tests.mutants --seeds {seeds} --json out/mutants.json --table docs/mutants.md` on
{day}, in {minutes} minutes of processor time; it may be stopped, and goes on where it was.

- **unit**: example tests of core and simulator, and the incidents (`yes`: at least one fails).
- **property**: walks of the core (`test_core_walk.py`), then Hypothesis on the planner, the gateway and the core
  machine (15 histories).
- **explorer**: `scenarios.explore`, {seeds} seeds with all faults and orders: in how many seeds, and the rules broken
  (`hung`: a seed did not end, and none came after it).
- **verifier**: every state of 2 pipelines x 1 GPU, of 1 x 1 with two faults, of 2 x 2 (coarse).
- `blind`: the detector never runs the mutated module. `-`: it looked and saw nothing. `?`: it has not looked yet.
  CPU: seconds, all detectors.

Without a mutant, which the runner tries first: {baseline}.

"""


def table(mutants: list[Mutant], results: Results) -> str:
    """The page docs/mutants.md."""
    lines = ["| mutant | breaks | unit | property | explorer | verifier | CPU |", "|---|---|---|---|---|---|---:|"]
    seen = dict.fromkeys(DETECTORS, 0)
    seeds = 0
    for mutant in mutants:
        row = results.of(mutant)
        cells = [cell(detector, row.get(detector)) for detector in DETECTORS]
        for detector, found in row.items():
            seen[detector] += found.found
            seeds = max(seeds, found.seeds)
        cpu = sum(found.cpu_s for found in row.values())
        lines.append(f"| `{mutant.name}` | {mutant.breaks} | {' | '.join(cells)} | {cpu:.0f} |")
    looked = {detector: sum(detector in results.of(mutant) for mutant in mutants) for detector in DETECTORS}
    total = ", ".join(f"{detector} {count} of {looked[detector]}" for detector, count in seen.items())
    missed = ", ".join(holes(mutants, results)) or "none"
    open_ = ", ".join(unjudged(mutants, results)) or "none"
    lines += ["", f"{len(mutants)} mutants. Found, of those looked at: {total}."]
    lines += [f"Found by nobody: {missed}. Still to be found: {open_}."]
    lines += ["", "## The first test that failed", ""]
    for mutant in mutants:
        row = results.of(mutant)
        tests = [f"{name} `{row[name].how}`" for name in ("unit", "property") if name in row and row[name].found]
        if tests:
            lines.append(f"- `{mutant.name}`: {', '.join(tests)}")
    rows = [results.of(mutant) for mutant in (None, *mutants)]
    minutes = round(sum(found.cpu_s for row in rows for found in row.values()) / 60)
    baseline = ", ".join(f"{detector} {cell(detector, rows[0].get(detector))}" for detector in DETECTORS)
    head = HEAD.format(day=date.today().isoformat(), seeds=seeds or SEEDS, minutes=minutes, baseline=baseline)
    return head + "\n".join(lines) + "\n"
