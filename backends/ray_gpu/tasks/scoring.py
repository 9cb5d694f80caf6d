"""How near a completion is to the answer.

A model that starts from random weights writes any of 256 bytes with equal probability, so it almost never hits one
place of an answer. Credit for using the task's own symbols at all is what it can find first; it then narrows its choice
to them, and from there one place in a few is right by chance, which is enough to learn the rest from.
"""

NEAR = 0.3
"""Credit for a wrong symbol of the right kind: enough to be found, and far from what the right one earns."""


def closeness(completion: str, answer: str, symbols: str) -> float:
    """Mean credit of all places, from 0 to 1: 1 where completion and answer agree, `NEAR` where it has another of
    `symbols`, 0 elsewhere. The longer of the two counts as the number of places, so 1 means equal. White space around
    the completion is ignored."""
    said = completion.strip()
    if said == answer:
        return 1.0
    places = max(len(said), len(answer))
    return sum(_credit(a, b, symbols) for a, b in zip(said, answer, strict=False)) / places


def _credit(said: str, wanted: str, symbols: str) -> float:
    if said == wanted:
        return 1.0
    return NEAR if said in symbols else 0.0
