"""Choosing tokens: from logits to a token and its log-probability, for a whole batch at once.

A draw is a pure function of the request's seed and the token's position in the sequence. So a token does not depend on
what else is in the batch (but for the last bits of its logits), and a trajectory that is resumed from a prefix draws
what it would have drawn in one go.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch

from backends.ray_gpu.engines.base import GenerateRequest

DRAW_BITS = 48  # few enough that no product of a draw and a sum rounds up to the sum


def draw(seed: int, position: int) -> float:
    """A uniform number strictly between 0 and 1, the same one for the same arguments."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> (64 - DRAW_BITS)) + 0.5) * 2.0**-DRAW_BITS


def choose(
    logits: torch.Tensor, requests: Sequence[GenerateRequest], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One token for each row of `logits` (batch, vocabulary), and its log-probability as `GenerateResult` defines it.

    `positions`: of the new tokens in their sequences. A log-probability that is not a number says that the row's logits
    are not finite; the token means nothing then.
    """
    temperatures = torch.tensor([request.temperature or 1.0 for request in requests])
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    tokens = logprobs.argmax(dim=-1)
    sampled = [row for row, request in enumerate(requests) if request.temperature > 0]
    if sampled:
        top_p = torch.tensor([requests[row].top_p for row in sampled])
        uniform = torch.tensor([draw(requests[row].seed, positions[row]) for row in sampled], dtype=torch.float64)
        tokens[sampled] = _inverse(nucleus(logprobs[sampled].exp(), top_p), uniform)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the fewest most probable tokens that together have at least `top_p` (one a row). Not normalised.

    Holtzman et al., The Curious Case of Neural Text Degeneration, 2020, section 3.1.
    """
    cut = (top_p < 1).nonzero().flatten()
    if len(cut):
        ordered, tokens = probabilities[cut].sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.masked_fill(before >= top_p[cut, None], 0.0)
        probabilities[cut] = torch.zeros_like(kept).scatter_(1, tokens, kept)
    return probabilities


def _inverse(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """For each row the first token at which the running sum passes that share of the whole: never one of weight 0."""
    sums = weights.double().cumsum(dim=-1)
    tokens = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=weights.shape[1] - 1)  # sums that are not numbers
