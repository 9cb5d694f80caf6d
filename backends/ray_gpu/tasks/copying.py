"""Saying the same again. `size`: the letters to repeat.

Each letter of the answer stands at a fixed distance from its original, so that one attention head solves it: the task
that a random model learns fastest.
"""

from backends.ray_gpu.tasks.base import Draws, Message, Prompt
from backends.ray_gpu.tasks.scoring import closeness

LETTERS = "abcd"
"""Few, so that a guess is right often enough to learn from."""


class Copy:
    def __init__(self, size: int) -> None:
        self._size = size

    def prompt(self, seed: str, index: int) -> Prompt:
        word = Draws(seed, "copy", self._size, index).text(LETTERS, self._size)
        asked = f"Repeat exactly: {word}"
        return Prompt(text=f"{word}=", messages=(Message(role="user", content=asked),), answer=word)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return closeness(completion, prompt.answer, LETTERS)
