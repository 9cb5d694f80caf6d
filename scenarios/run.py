"""Any declared scenario: `python -m scenarios.run FILE.yaml`, or the name of a shipped one."""

from collections.abc import Sequence

from scenarios import common
from scenarios.list import print_list
from scenarios.options import parser


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("scenarios.run", "run a declared scenario", takes_file=True)
    options = made.parse_args(argv)
    if options.list:
        return common.guarded(print_list)
    if options.scenario is None:
        made.error("name a scenario file, or a shipped scenario (--list names them)")
    return common.guarded(lambda: common.run(options, options.scenario))


if __name__ == "__main__":
    raise SystemExit(main())
