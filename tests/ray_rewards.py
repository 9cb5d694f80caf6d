"""Reward functions that go wrong, for pipelines of real runs; they are called in the pipeline's desk."""

import itertools
import time
from typing import Any

LIMIT_S = 0.2
"""`reward_limit_s` of those who use `now_and_then`."""

_calls = itertools.count()


def now_and_then(prompt: dict[str, Any], completion: str) -> float:
    """Of four calls in a row one raises, one takes far too long, and two have a reward."""
    call = next(_calls) % 4
    if call == 0:
        raise ValueError("no rule for this completion")
    if call == 1:
        time.sleep(100 * LIMIT_S)
    return float(call == 2)


def always(prompt: dict[str, Any], completion: str) -> float:
    raise KeyError("answer_key")
