"""What a trainer is built from and trained on, as plain records. Nothing heavy is imported here.

A **row** is one trajectory ready for training: its tokens, how many of them are the prompt, the log-probability under
which each generated token was sampled, and the advantage all of its generated tokens share.
"""

import math
from collections.abc import Sequence
from typing import Literal

from core.errors import ConfigError, RequestError
from core.model import Record

DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}


class TrainerConfig(Record, frozen=True, kw_only=True):
    """One rank of a trainer group; everything but `rank` is the same on every rank of it."""

    model: str
    """Local Hugging Face folder."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size; the data-parallel size is world_size / (tp · pp)."""
    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations; gradients, optimizer state and master weights are float32."""
    seed: int = 0
    learning_rate: float = 1e-6
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.0
    """Decoupled, on matrices only: biases and norm weights are left alone."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    kl_coef: float = 0.0
    """Weight of the KL term against the weights the trainer was built with; 0 keeps no reference copy."""
    temperature: float = 1.0
    """Of the sampling distribution whose log-probabilities the rows carry."""
    micro_batch_tokens: int = 4096
    """Most tokens, padding included, in one forward pass; a single longer row goes alone."""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tp * self.pp)


class Row(Record, frozen=True, kw_only=True):
    """One trajectory ready for training."""

    tokens: tuple[int, ...]
    """Prompt and generated tokens."""
    prompt_tokens: int
    """How many of `tokens` are the prompt; at least 1, for the first generated token needs a predecessor."""
    logprobs: tuple[float, ...]
    """Behaviour log-probability of each generated token, in nats, at the configured temperature."""
    advantage: float

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens


def check_config(config: TrainerConfig) -> None:
    """Raise `ConfigError` for settings no trainer can be built from."""
    positive = ("tp", "pp", "world_size", "micro_batch_tokens", "learning_rate", "temperature")
    for name in positive:
        if not getattr(config, name) > 0:
            raise ConfigError(f"trainer.{name}", f"{getattr(config, name)} is not positive")
    for name in ("grad_clip", "clip_low", "clip_high", "kl_coef", "weight_decay"):
        if not getattr(config, name) >= 0:
            raise ConfigError(f"trainer.{name}", f"{getattr(config, name)} is negative")
    if config.world_size % (config.tp * config.pp):
        raise ConfigError(
            "trainer.world_size",
            f"{config.world_size} ranks are not a multiple of tp {config.tp} times pp {config.pp}",
        )
    if not 0 <= config.rank < config.world_size:
        raise ConfigError("trainer.rank", f"{config.rank} is not within 0..{config.world_size - 1}")
    if config.dtype not in DTYPES[config.device]:
        allowed = " or ".join(DTYPES[config.device])
        raise ConfigError("trainer.dtype", f"{config.dtype} is not supported on {config.device}", f"use {allowed}")


def check_rows(rows: Sequence[Row]) -> None:
    """Raise `RequestError` for rows that say something impossible about themselves."""
    for index, row in enumerate(rows):
        if not 1 <= row.prompt_tokens <= len(row.tokens):
            raise RequestError(f"row {index}: {row.prompt_tokens} prompt tokens of {len(row.tokens)} tokens in all")
        if len(row.logprobs) != row.generated:
            raise RequestError(f"row {index}: {len(row.logprobs)} log-probs for {row.generated} generated tokens")
        if not math.isfinite(row.advantage) or not all(math.isfinite(value) for value in row.logprobs):
            raise RequestError(f"row {index}: its advantage or a log-prob is not a finite number")
