"""Everything that is measured, in one table: `python -m benchmarks [--quick] [NAME ...]`.

Exit 1 if a bound is missed.
"""

import importlib

from benchmarks.table import Row, show
from scenarios.parsing import Parser, one_of

NAMES = ("loop", "planning", "reports", "runs", "worlds", "verify", "day")
"""The modules, the quickest first."""
ON_REQUEST = ("ray",)
"""Not by default: they need packages beyond the simulator's."""


def main() -> int:
    known = (*NAMES, *ON_REQUEST)
    help_ = f"which: {', '.join(known)}; the first {len(NAMES)} by default"
    parser = Parser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", type=one_of(known), metavar="NAME", help=help_)
    parser.add_argument("--quick", action="store_true", help="less of everything, and wider noise")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.names or NAMES:
        for row in importlib.import_module(f"benchmarks.{name}").run(options.quick):
            rows.append(row)
            print(show(row), flush=True)
    missed = [row.name for row in rows if not row.ok]
    bounds = sum(row.bound is not None for row in rows)
    print(f"{len(missed)} of {bounds} bounds are missed: {', '.join(missed) or '-'}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
