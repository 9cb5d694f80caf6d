"""What a prompt is, what a task is, and the draws that both need."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from core.model import Record


class Message(Record, frozen=True, kw_only=True):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


class Prompt(Record, frozen=True, kw_only=True):
    """What a model is asked. A tokenizer with a chat template takes `messages`, any other takes `text`."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    answer: Any = None
    """What the reward compares with."""
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    """Whatever else the line of a prompts file had."""

    def as_dict(self) -> dict[str, Any]:
        """As a reward function gets it: `prompt` (text, or a list of messages), `answer`, and the other fields."""
        messages = [{"role": turn.role, "content": turn.content} for turn in self.messages]
        return {**self.fields, "prompt": self.text or messages, "answer": self.answer}


class Task(Protocol):
    def prompt(self, seed: str, index: int) -> Prompt:
        """Prompt number `index` of those that `seed` stands for."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """How right the completion is: 1 for the answer alone."""
        ...


class Draws:
    """Whole numbers that depend on the names they are drawn for, and on nothing else."""

    def __init__(self, *names: object) -> None:
        self._key = "\x1f".join(map(str, names)).encode()
        self._drawn = 0

    def below(self, bound: int) -> int:
        """From 0 to `bound` - 1. Of 64 bits, so that no small bound favours any value noticeably."""
        digest = blake2b(self._key + self._drawn.to_bytes(8), digest_size=8)
        self._drawn += 1
        return int.from_bytes(digest.digest()) % bound

    def text(self, symbols: Sequence[str], length: int) -> str:
        """So many symbols, with repetitions."""
        return "".join(symbols[self.below(len(symbols))] for _ in range(length))
