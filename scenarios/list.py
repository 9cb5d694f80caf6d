"""The scenarios that come with Turnstile, a line each."""

from collections.abc import Sequence

from scenarios import catalogue
from scenarios.common import guarded
from scenarios.outcome import OK
from scenarios.parsing import Parser


def lines() -> list[str]:
    width = max(len(name) for name in catalogue.names())
    return [f"{name:<{width}}  {catalogue.about(name)}" for name in catalogue.names()]


def print_list() -> int:
    print("\n".join(lines()), flush=True)
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    Parser(prog="python -m scenarios.list", description="list the shipped scenarios").parse_args(argv)
    return guarded(print_list)


if __name__ == "__main__":
    raise SystemExit(main())
