"""Adding two numbers. `size`: the digits that each has at most."""

from backends.ray_gpu.tasks.base import Draws, Message, Prompt
from backends.ray_gpu.tasks.scoring import closeness

DIGITS = "0123456789"


class Arithmetic:
    def __init__(self, size: int) -> None:
        self._size = size

    def prompt(self, seed: str, index: int) -> Prompt:
        draws = Draws(seed, "arithmetic", self._size, index)
        a, b = draws.below(10**self._size), draws.below(10**self._size)
        asked = f"What is {a} + {b}? Answer with the number only."
        return Prompt(text=f"{a}+{b}=", messages=(Message(role="user", content=asked),), answer=str(a + b))

    def reward(self, prompt: Prompt, completion: str) -> float:
        return closeness(completion, prompt.answer, DIGITS)
