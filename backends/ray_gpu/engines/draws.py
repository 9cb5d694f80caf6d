"""Drawing a token from a distribution, keyed: the same seed, position and distribution give the same token, everywhere.

The Gumbel-max trick: `argmax(logprob + gumbel)` is a draw from the distribution (Gumbel 1954; Maddison, Tarlow, Minka,
"A* Sampling", 2014, section 2). The noise of each (seed, position, token) is a hash of the three, the finaliser of
SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014), so there is no generator whose
state depends on what else is in the batch. Integer arithmetic only, up to the uniform number: the same on every device.
"""

import torch

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number: torch's 64-bit integers are signed, and wrap
MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
BITS = 53  # of a double's mantissa
AT_ONCE = 1 << 22
"""Numbers drawn for at once: about 130 MiB of them, temporaries included."""


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token a row: indices, shape (rows, 1), int64.

    `logprobs` (rows, tokens): natural logarithms, -inf for what must not be drawn; they need not be normalised.
    `seeds`, `positions` (rows,): integers. Works on some rows at a time, so that it never takes much memory.
    """
    rows = max(1, AT_ONCE // logprobs.shape[1])
    parts = zip(logprobs.split(rows), seeds.split(rows), positions.split(rows), strict=True)
    return torch.cat([_draw(*part) for part in parts])


def _draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    noise = uniform(seeds, positions, logprobs.shape[1])
    noise.log_().neg_().log_().neg_()
    return torch.argmax(noise.add_(logprobs), dim=1, keepdim=True)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Numbers in (0, 1), double, shape (rows, tokens): never 0 or 1, whose Gumbel noise would be infinite."""
    rows = _mix(_mix(seeds.to(torch.int64)) + positions.to(torch.int64))
    columns = torch.arange(1, tokens + 1, device=seeds.device, dtype=torch.int64) * GOLDEN
    hashed = _finalise(rows[:, None] + columns)
    return _shifted(hashed, 64 - BITS).to(torch.float64).add_(0.5).mul_(2.0**-BITS)


def _mix(key: torch.Tensor) -> torch.Tensor:
    return _finalise(key + GOLDEN)


def _finalise(key: torch.Tensor) -> torch.Tensor:
    key = (key ^ _shifted(key, 30)).mul_(MIX_1)
    key = (key ^ _shifted(key, 27)).mul_(MIX_2)
    return key ^ _shifted(key, 31)


def _shifted(key: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, filled up with zeros: `>>` alone would copy the sign."""
    return (key >> by) & ((1 << (64 - by)) - 1)
