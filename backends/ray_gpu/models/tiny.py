"""A Llama of about a hundred thousand random parameters, made on the spot: everything a real one has, but small.

Grouped-query attention with heads that divide by 2, so that tensor parallelism can be tried on it; two layers, so that
pipeline parallelism can, and because copying needs no more. It is the same on every machine.
"""

import json
from pathlib import Path

from backends.ray_gpu.models.byte_tokenizer import BEGIN, END, PAD, VOCAB_SIZE, write_tokenizer

NAME = "tiny-llama-v1"
"""Of its folder in the cache. Whoever changes the model changes the number."""

SEED = 0
HIDDEN = 64
FEED_FORWARD = 192
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD = HIDDEN // HEADS
POSITIONS = 512
SPREAD = 0.02
"""Standard deviation of the weights, as in GPT-2 and Llama."""


def build(folder: Path) -> None:
    """Write config, weights (fp32) and tokenizer into an empty folder."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * SPREAD
        for name, shape in shapes().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(), indent=1) + "\n", encoding="utf-8")
    write_tokenizer(folder)


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu",
        "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6, "initializer_range": SPREAD,
        "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD,
    }  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Every parameter by its Hugging Face name; vectors are norms."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB_SIZE, HIDDEN)}
