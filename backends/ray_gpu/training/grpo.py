"""Group relative policy optimisation: advantages within a group, and the clipped policy loss of a token.

Sources: advantages, the clipped objective with its KL term and the unbiased estimator of that KL are those of
DeepSeekMath (Shao et al. 2024, arXiv 2402.03300, equations 3 and 4); two separate clip bounds and the average over
all tokens of the batch, not over trajectories, are those of DAPO (Yu et al. 2025, arXiv 2503.14476).

Nothing heavy is imported: tensors are only ever asked for their own methods.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-6) -> list[float]:
    """(reward - mean) / (standard deviation + eps), both over the rewards of the same group, in the order given.

    The deviation is the population's, so that a group of one is defined; where all rewards of a group are equal
    (a group of one included) nothing was learned and every advantage is exactly 0.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards but {len(groups)} groups")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        found = [rewards[index] for index in indices]
        if min(found) == max(found):
            continue
        mean = math.fsum(found) / len(found)
        deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in found) / len(found))
        for index in indices:
            advantages[index] = (rewards[index] - mean) / (deviation + eps)
    return advantages


class TokenLoss(NamedTuple):
    """What one forward pass says about each generated token; every tensor has the shape of the log-probs, [n]."""

    loss: Tensor
    """To be minimised: minus the clipped objective, plus the KL term."""
    ratio: Tensor
    """Probability now over probability when it was sampled."""
    clipped: Tensor
    """1 where the clip bound decided the loss, else 0."""
    kl: Tensor
    """Estimate of KL(policy || reference); 0 where there is no reference."""


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    reference: Tensor | None = None,
) -> TokenLoss:
    """The loss of each generated token, not yet averaged.

    `logprobs` (differentiable), `behaviour`, `advantages` and `reference` are all [n], float32. The KL estimate is
    exp(d) - d - 1 with d = reference - logprobs: never negative, and unbiased for tokens sampled from the policy.
    """
    ratio = (logprobs - behaviour).exp()
    free = ratio * advantages
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -free.minimum(bound)
    kl = logprobs.new_zeros(logprobs.shape)
    if reference is not None:
        gap = reference - logprobs
        kl = gap.exp() - gap - 1
        loss = loss + kl_coef * kl
    return TokenLoss(loss, ratio.detach(), (bound < free).detach(), kl.detach())
