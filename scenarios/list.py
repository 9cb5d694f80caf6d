"""The scenarios that come with Turnstile, a line each."""

from scenarios import catalogue
from scenarios.common import guarded
from scenarios.options import Parser
from scenarios.outcome import OK


def lines() -> list[str]:
    width = max(len(name) for name in catalogue.names())
    return [f"{name:<{width}}  {catalogue.about(name)}" for name in catalogue.names()]


def main() -> int:
    Parser(prog="python -m scenarios.list", description="list the shipped scenarios").parse_args()
    print("\n".join(lines()))
    return OK


if __name__ == "__main__":
    raise SystemExit(guarded(main))
