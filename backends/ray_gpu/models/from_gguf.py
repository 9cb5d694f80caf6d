"""A Llama in GGUF, llama.cpp's file format, as a folder in Hugging Face's format: bf16 weights, config, tokenizer.

Quantised tensors are taken apart again by the `gguf` package. The query and key rows of each head come back in Hugging
Face's order: llama.cpp rotates neighbouring rows (0 with 1), Hugging Face the halves of a head (0 with d/2), and its
converter permutes the rows accordingly (`LlamaModel.permute` in convert_hf_to_gguf.py).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.reading import one_line

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


MAGIC = b"GGUF"


def check(source: Path) -> None:
    """Raises ConfigError unless it begins as a GGUF file does: for whoever wants to know before anything starts."""
    try:
        with source.open("rb") as file:
            begins = file.read(len(MAGIC))
    except OSError as bad:
        raise _damaged(source, bad.strerror or str(bad)) from bad
    if begins != MAGIC:
        raise _damaged(source, f"it is {'empty' if not begins else 'another kind of file'}")


def build(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` into an empty folder. Raises ConfigError if it is no Llama, or cut off
    or damaged."""
    from gguf import GGUFReader

    check(source)
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError, OSError) as bad:  # whatever it trips over: it does not check as it goes
        raise _damaged(source, f"it is cut off or damaged ({bad})") from bad
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ConfigError(str(source), f"is a {architecture}", "only Llamas are converted")
    _write_weights(reader, folder)
    (folder / "config.json").write_text(json.dumps(_config(reader), indent=1) + "\n", encoding="utf-8")
    _write_tokenizer(source, folder)


def _damaged(source: Path, why: str) -> ConfigError:
    return ConfigError(str(source), f"cannot be read as a GGUF file: {one_line(why)}", "fetch or install it again")


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises KeyError if a Llama has no such one."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{TOP[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{IN_LAYER[part]}.{kind}"


def halves(rows: "np.ndarray", heads: int) -> "np.ndarray":
    """The rows of each head: all even ones, then all odd ones. (heads * d, columns) -> the same shape."""
    count, columns = rows.shape
    pairs = rows.reshape(heads, count // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(count, columns)


def _write_weights(reader: "GGUFReader", folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": _llama(reader, "attention.head_count"), "attn_k": _llama(reader, "attention.head_count_kv")}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = halves(values, heads[part])
        weights[hf_name(tensor.name)] = torch.tensor(values, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(reader: "GGUFReader") -> dict[str, Any]:
    columns = {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors}  # GGUF lists the innermost size first
    vocabulary, tied = columns["token_embd.weight"], "output.weight" not in columns
    hidden, heads = _llama(reader, "embedding_length"), _llama(reader, "attention.head_count")
    theta = float(_llama(reader, "rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": _llama(reader, "feed_forward_length"),
        "num_hidden_layers": _llama(reader, "block_count"), "num_attention_heads": heads,
        "num_key_value_heads": _llama(reader, "attention.head_count_kv"), "head_dim": hidden // heads,
        "max_position_embeddings": _llama(reader, "context_length"),
        # GGUF has it in fp32, where 1e-5 is 9.99999974738e-06.
        "rms_norm_eps": float(f"{_llama(reader, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": tied, "initializer_range": 0.02,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
    }  # fmt: skip


def _write_tokenizer(source: Path, folder: Path) -> None:
    """transformers knows how GGUF writes a tokenizer down, its chat template included."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _llama(reader: "GGUFReader", key: str) -> Any:
    return _field(reader, f"llama.{key}")


def _field(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()
