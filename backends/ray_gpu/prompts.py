"""Prompts from a file: JSON lines, checked whole before anything runs, handed out in an order that a seed decides.

Each line is an object: `prompt` (text, or a list of messages with `role` and `content`), `answer` if the reward needs
one, and anything else that it needs. Every epoch has each prompt once, in another order.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from backends.ray_gpu.tasks.base import Message, Prompt
from core.errors import ConfigError
from core.reading import kind_of, one_line

EPOCHS_KEPT = 4
"""Orders remembered: batches that are open at once may lie in neighbouring epochs, and so may an evaluation's."""


class PromptFile:
    """The prompts of a file, by seed and index."""

    def __init__(self, path: str | Path) -> None:
        """Reads and checks all of it. Raises ConfigError with the file and the line."""
        self._prompts = load_prompts(path)
        self._order = lru_cache(maxsize=EPOCHS_KEPT)(self._shuffled)

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, seed: str, index: int) -> Prompt:
        """Prompt number `index` of the endless sequence of epochs that `seed` stands for."""
        epoch, place = divmod(index, len(self._prompts))
        return self._prompts[self._order(seed, epoch)[place]]

    def _shuffled(self, seed: str, epoch: int) -> list[int]:
        """Sorting by a hash gives the same order in every process and on every version of Python."""
        prefix = f"{seed}\x1f{epoch}\x1f".encode()
        return sorted(range(len(self._prompts)), key=lambda i: blake2b(prefix + str(i).encode()).digest())


def load_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file, in its order; empty lines are skipped. Raises ConfigError with file and line."""
    name = one_line(str(path))
    prompts = tuple(_prompt(line, f"{name}:{number}") for number, line in _lines(Path(path), name))
    if not prompts:
        raise ConfigError(name, "has no prompts", 'write lines such as {"prompt": "2+2=", "answer": "4"}')
    return prompts


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as bad:
        raise ConfigError(name, bad.strerror or type(bad).__name__) from None
    except ValueError as bad:  # bytes that are not UTF-8, or a path with a NUL in it
        raise ConfigError(name, "is not UTF-8 text" if isinstance(bad, UnicodeDecodeError) else str(bad)) from None
    # Not splitlines: JSON strings may hold U+2028 and the like.
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as bad:
        said = f"{bad.msg} at column {bad.colno}" if isinstance(bad, json.JSONDecodeError) else one_line(str(bad))
        raise ConfigError(where, f"is no JSON: {said}", "write one object on each line") from None
    if not isinstance(record, dict):
        raise ConfigError(where, f"must be an object, not {kind_of(record)}", 'such as {"prompt": ..., "answer": ...}')
    if "prompt" not in record:
        raise ConfigError(where, "has no 'prompt'", f"its keys are {one_line(', '.join(record)) or 'none'}")
    asked, answer = record.pop("prompt"), record.pop("answer", None)
    if isinstance(asked, str) and asked:
        return Prompt(text=asked, answer=answer, fields=record)
    return Prompt(messages=_messages(asked, where), answer=answer, fields=record)


def _messages(asked: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(asked, list) or not asked:
        raise ConfigError(where, f"'prompt' must be text or a list of messages, not {kind_of(asked)}")
    return tuple(_message(turn, f"{where}: prompt[{i}]") for i, turn in enumerate(asked))


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
        raise ConfigError(where, "must have the texts 'role' and 'content'", 'as {"role": "user", "content": "Hello"}')
    return Message(role=turn["role"], content=turn["content"])
