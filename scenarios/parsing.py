"""How arguments are read, and what they name to be written is looked at first, on every command line of ours."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from core.errors import ConfigError
from core.reading import meant
from scenarios.outcome import REFUSED


class Parser(argparse.ArgumentParser):
    """argparse, but what is wrong is one line, and only whole option names count."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Nothing of ours is ever meant to be empty: an empty file name would be the folder `.`, and is an unset
        variable of a shell more often than a wish."""
        given = sys.argv[1:] if args is None else list(args)
        for before, text in zip(("", *given), given, strict=False):
            if not text.strip() or re.fullmatch("-[a-z0-9-]+=", text):
                option = text.strip()[:-1] or before
                self.error(f"the argument {f'after {option}' if option else 'given'} is empty; is a variable unset?")
        return super().parse_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())} (see --help)", file=sys.stderr)
        raise SystemExit(REFUSED)


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in known:
            return text
        problem = f"{text[:40]!r} is not one of {', '.join(known)}"
        raise argparse.ArgumentTypeError("; ".join(filter(None, (problem, meant(text, known)))))

    return parse


def whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text[:40]!r}")

    return parse


def check_writable(path: Path, where: str) -> None:
    """Raises ConfigError unless a file can be written there."""
    try:
        if path.is_dir():
            raise ConfigError(where, f"{path} is a directory", "name a file")
        if not path.parent.is_dir():
            raise ConfigError(where, f"there is no directory {path.parent}", "make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(where, f"{path} may not be written")
    except (OSError, ValueError) as bad:
        raise ConfigError(where, f"{str(path)[:80]!r} is no usable file name: {bad}") from None


def same_file(one: Path, other: Path) -> bool:
    """Whether writing one would change the other: a link of either kind counts."""
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except OSError:
        return False  # one of them is not there


def check_folder(path: Path, where: str) -> None:
    """Raises ConfigError unless files can be written into that folder, or it can be made."""
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not nearest.is_dir():
            raise ConfigError(where, f"{nearest} is not a directory", "name one, or one that can be made")
        if not os.access(nearest, os.W_OK):
            raise ConfigError(where, f"{nearest} may not be written")
    except (OSError, ValueError) as bad:
        raise ConfigError(where, f"{str(path)[:80]!r} is no usable folder name: {bad}") from None
