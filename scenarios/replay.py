"""A recorded log through `decide` again: `python -m scenarios.replay LOG`. Exit 0: the same actions; 1: others."""

from collections.abc import Sequence

from core.trace import read_log, replay
from scenarios.common import guarded
from scenarios.outcome import FAILED, OK
from scenarios.parsing import Parser


def main(argv: Sequence[str] | None = None) -> int:
    made = Parser(prog="python -m scenarios.replay", description="feed the events of a log through the scheduler again")
    made.add_argument("log", metavar="LOG", help="a file that --trace wrote, on any backend")
    options = made.parse_args(argv)
    return guarded(lambda: _replay(options.log))


def _replay(path: str) -> int:
    header, entries = read_log(path)
    divergence = replay(header, entries)
    if divergence is not None:
        print(f"{path}: {divergence}")
        return FAILED
    what = f"{header.scenario}, demand {header.demand}, seed {header.seed}"
    print(f"{path}: decide gives the same actions ({what})", flush=True)
    if entries.truncated:
        print(f"note: {entries.truncated}")
    return OK


if __name__ == "__main__":
    raise SystemExit(main())
