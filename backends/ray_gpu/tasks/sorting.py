"""Putting digits in ascending order. `size`: how many."""

from backends.ray_gpu.tasks.base import Draws, Message, Prompt
from backends.ray_gpu.tasks.scoring import closeness

DIGITS = "0123456789"


class Sort:
    def __init__(self, size: int) -> None:
        self._size = size

    def prompt(self, seed: str, index: int) -> Prompt:
        digits = Draws(seed, "sort", self._size, index).text(DIGITS, self._size)
        asked = f"Sort the digits of {digits} in ascending order. Answer with the digits only."
        answer = "".join(sorted(digits))
        return Prompt(text=f"{digits}<", messages=(Message(role="user", content=asked),), answer=answer)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return closeness(completion, prompt.answer, DIGITS)
