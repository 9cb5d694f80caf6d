"""One planning decision as JSON: `python -m scenarios.plan SNAPSHOT.json [--explain]`; `-` reads standard input.

What a snapshot may say, and what is refused, is `core.snapshot`'s business; this is the shell around it.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from core.errors import ConfigError
from core.snapshot import plan_snapshot
from scenarios.common import guarded
from scenarios.options import STDOUT as STDIN
from scenarios.outcome import OK
from scenarios.parsing import Parser


def main(argv: Sequence[str] | None = None) -> int:
    made = Parser(prog="python -m scenarios.plan", description="plan once, from a snapshot of the cluster")
    made.add_argument("snapshot", metavar="SNAPSHOT.json", help="the snapshot; - for standard input")
    made.add_argument("--explain", action="store_true", help="add a sentence for each decision")
    options = made.parse_args(argv)
    return guarded(lambda: _plan(options.snapshot, options.explain))


def _plan(where: str, explain: bool) -> int:
    print(json.dumps(plan_snapshot(read_snapshot(where), explain=explain), indent=2), flush=True)
    return OK


def read_snapshot(where: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError with the line of what is wrong."""
    name = "standard input" if where == STDIN else where
    try:
        if where == STDIN:
            text = sys.stdin.buffer.read().decode()
        else:
            with open(where, "rb") as file:
                text = file.read().decode()
        found = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    except OSError as error:
        raise ConfigError(name, f"cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}", f"is no JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ConfigError(name, "is not text in UTF-8") from None
    except RecursionError:
        raise ConfigError(name, "is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(name, str(error)) from None
    if not isinstance(found, dict):
        raise ConfigError(name, "must be one JSON object", 'such as {"gpus": 4, "gpus_per_node": 4, ...}')
    return found


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


if __name__ == "__main__":
    raise SystemExit(main())
