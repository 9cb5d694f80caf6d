"""The runner: `python -m tests.mutants [NAME...] [--by LIST] [--json FILE] [--table FILE] [--seeds N] [--time S]`.

Exit codes: 0 every mutant was found; 1 one was not, or the unchanged packages are found guilty; 2 the table is wrong.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scenarios.parsing import Parser, whole
from tests.mutants.detectors import DETECTORS, SEEDS, detect
from tests.mutants.results import BASELINE, Results, cell, holes, table
from tests.mutants.table import MUTANTS
from tests.mutants.tree import BadMutant, Mutant, copied, digest, mutated


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    began = time.monotonic()
    wrong = [name for name in options.names if name not in {mutant.name for mutant in MUTANTS}]
    if wrong:
        print(f"error: no mutant is called {', '.join(wrong)}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    try:
        for mutant in chosen:
            mutated(mutant)
    except BadMutant as bad:
        print(f"error: {bad}", file=sys.stderr)
        return 2
    for file in (options.json, options.table):
        if file is not None and (file.is_dir() or file.parent.is_file()):
            print(f"error: {file} is no file that can be written", file=sys.stderr)
            return 2
    with copied(None) as pristine:  # what is edited in the meantime is not judged
        results = Results(options.json, digest(pristine))
        baseline: list[Mutant | None] = [] if options.names else [None]
        for mutant in [*baseline, *chosen]:
            if options.time is not None and time.monotonic() - began > options.time:
                print("out of time; go on with the same --json")
                break
            _run(mutant, pristine, options, results)
            if mutant is None and any(found.found for found in results.of(None).values()):
                print("the unchanged packages are found guilty: what is found in a mutant would mean nothing")
                return 1
    if options.table is not None:
        options.table.write_text(table(chosen, results), encoding="utf-8")
    missed = holes(chosen, results)
    print(f"found by nobody: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def _parser() -> Parser:
    made = Parser(prog="python -m tests.mutants", description="faults put in on purpose, and found")
    made.add_argument("names", metavar="NAME", nargs="*", help="mutants; left out: all, after the unchanged packages")
    made.add_argument("--by", type=_detectors, default=DETECTORS, metavar="LIST", help=", ".join(DETECTORS))
    made.add_argument("--json", type=Path, metavar="FILE", help="results as they come; what is there is kept")
    made.add_argument("--table", type=Path, metavar="FILE", help="the page docs/mutants.md")
    of_seeds = f"of the explorer ({SEEDS})"
    made.add_argument("--seeds", type=whole(1, 1_000_000), default=SEEDS, metavar="N", help=of_seeds)
    made.add_argument("--time", type=float, metavar="S", help="begin no other mutant after so many seconds")
    return made


def _detectors(text: str) -> tuple[str, ...]:
    named = tuple(text.split(","))
    for name in named:
        if name not in DETECTORS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DETECTORS)}")
    return named


def _run(mutant: Mutant | None, pristine: Path, options: argparse.Namespace, results: Results) -> None:
    """Every detector that has not looked at it yet; a line for what they say."""
    todo = [detector for detector in options.by if detector not in results.of(mutant)]
    if not todo:
        return
    with copied(mutant, pristine) as tree:
        for detector in todo:
            results.put(mutant, detector, detect(tree, mutant, detector, options.seeds))
    row = results.of(mutant)
    said = [f"{name}: {cell(name, row[name])} ({row[name].cpu_s:.0f} s)" for name in DETECTORS if name in row]
    print(f"{mutant.name if mutant else BASELINE}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
