"""What a Hugging Face folder declares, reduced to what the Megatron model and the weight mapping need.

Everything this trainer would compute differently from the engine is refused here, by name, before any weight is read.
"""

import json
import math
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.model import Record


class Family(Record, frozen=True, kw_only=True):
    """How one architecture differs from plain Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}


class Rope(Record, frozen=True, kw_only=True):
    """Rotary position embedding; `kind` is Hugging Face's `rope_type`."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


class Architecture(Record, frozen=True, kw_only=True):
    """The shape of a decoder-only model."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    rope: Rope

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks: as few as divide evenly."""
        return math.ceil(self.vocab / tp) * tp


def read_architecture(folder: str) -> Architecture:
    """The architecture of a local Hugging Face folder.

    Raises `ConfigError` when there is no readable config.json, or when the architecture or one of its settings is not
    supported; the message names what is.
    """
    declared = _read_json(folder)
    name = _name(folder, declared)
    config = _defaults_filled_in(folder)
    _refuse_unsupported(folder, name, config)
    heads = config["num_attention_heads"]
    return Architecture(
        name=name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=FAMILIES[name].qkv_bias,
        qk_norm=FAMILIES[name].qk_norm,
        rope=_rope(folder, config),
    )


def check_parallel(arch: Architecture, tp: int, pp: int) -> None:
    """Raise `ConfigError` where the model cannot be cut into tp x pp pieces."""
    for what, count in (("attention heads", arch.heads), ("key/value heads", arch.kv_heads), ("FFN columns", arch.ffn)):
        if count % tp:
            raise ConfigError("trainer.tp", f"{arch.name} has {count} {what}, which {tp} ranks cannot share evenly")
    if arch.layers % pp:
        raise ConfigError("trainer.pp", f"{arch.name} has {arch.layers} layers, which {pp} stages cannot share evenly")


def _read_json(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(folder, "no readable config.json", "give the folder of a Hugging Face model") from error
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON: {error}") from error


def _name(folder: str, declared: dict[str, Any]) -> str:
    names = declared.get("architectures") or []
    if len(names) == 1 and names[0] in FAMILIES:
        return names[0]
    found = ", ".join(names) or f"none declared (model_type {declared.get('model_type', 'missing')})"
    raise ConfigError(folder, f"unsupported architecture: {found}", f"supported are {', '.join(FAMILIES)}")


def _defaults_filled_in(folder: str) -> dict[str, Any]:
    """config.json as transformers reads it: a saved config leaves out whatever equals the class's default."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(folder, f"config.json is not usable: {error}") from error


def _refuse_unsupported(folder: str, name: str, config: dict[str, Any]) -> None:
    refused = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "attention_dropout": bool(config.get("attention_dropout")),
        "quantization_config": config.get("quantization_config") is not None,
    }
    for key, bad in refused.items():
        if bad:
            raise ConfigError(folder, f"{name} with {key} = {config[key]} is not supported")


def _rope(folder: str, config: dict[str, Any]) -> Rope:
    """Transformers 5 keeps it all in `rope_parameters`, transformers 4 in `rope_theta` and `rope_scaling`."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(folder, f"rope_type {kind} is not supported", "supported are default, linear, llama3")
    return Rope(
        kind=kind,
        theta=float(given.get("rope_theta", config.get("rope_theta") or 10000.0)),
        factor=float(given.get("factor", 1.0)),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_max_positions=int(given.get("original_max_position_embeddings", 8192)),
    )
