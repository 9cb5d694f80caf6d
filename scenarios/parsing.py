"""How arguments are read, on every command line of ours."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from scenarios.outcome import REFUSED


class Parser(argparse.ArgumentParser):
    """argparse, but what is wrong is one line, and only whole option names count."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())} (see --help)", file=sys.stderr)
        raise SystemExit(REFUSED)


def whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text[:40]!r}")

    return parse
