"""The policy as a Megatron-Core GPTModel: local layer spec, no Transformer Engine, no Apex, on CPU as on CUDA.

1. Parameters are allocated but not initialised here; whoever builds a model loads every one of them.
2. Two parts of Megatron's model ask for CUDA although nothing in them needs it, and both are replaced by a module of
   the same interface instead of patching torch: rotary embeddings, and attention, whose local version also keeps a
   buffer of batch x heads x length² for the life of the process. Torch's own scaled-dot-product attention needs none.
3. No dropout anywhere: log-probabilities in training must be those of the policy.
"""

import math

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from backends.ray_gpu.training.architecture import Architecture, Rope
from backends.ray_gpu.training.parallel import Place


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Rotation per position of each pair of head dimensions, [head_dim / 2] float32 on the CPU.

    Sources: RoPE (Su et al. 2021, arXiv 2104.09864); "linear" divides positions by the factor; "llama3" divides only
    the slow rotations, with a linear ramp in between, as published with Llama 3.1.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            turns = rope.original_max_positions * plain / (2 * math.pi)
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            kept = share.clamp(0.0, 1.0)
            return kept * plain + (1 - kept) * plain / rope.factor
        case _:
            return plain


class Rotary(nn.Module):
    """Rotary angles for a whole sequence, computed where the model is; the interface of Megatron's RotaryEmbedding."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, *_, **__) -> int:
        received = transformer.input_tensor
        return (received if received is not None else transformer_input).size(0)

    def forward(self, max_seq_len: int, *_, **__) -> Tensor:
        """[s, 1, 1, head_dim] float32: the angle of each dimension at each position."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class CausalAttention(MegatronModule):
    """Causal attention of the heads on this rank; the interface of Megatron's DotProductAttention."""

    def __init__(self, config: TransformerConfig, *_, **__) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *_, **__) -> Tensor:
        """[s, b, heads, d] each (fewer heads in key and value under grouped queries) to [s, b, heads * d]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        context = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return context.permute(2, 0, 1, 3).flatten(2)


class Policy(GPTModel):
    """GPTModel that leaves the copy of a tied embedding on the last stage to the loader instead of a CUDA broadcast."""

    def setup_embeddings_and_output_layer(self) -> None:
        if not self.share_embeddings_and_output_weights or self.pre_process == self.post_process:
            super().setup_embeddings_and_output_layer()
            return
        weight = self.shared_embedding_or_output_weight()
        weight.is_embedding_or_output_parameter = True
        weight.shared_embedding = True
        weight.shared = self.post_process  # the copy counts once in the gradient norm


def build(arch: Architecture, place: Place, dtype: torch.dtype) -> Policy:
    """This rank's part of the model, its parameters allocated on the device and still to be loaded."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arch.qk_norm)
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    model = Policy(
        config=transformer_config(arch, place, dtype),
        transformer_layer_spec=spec,
        vocab_size=arch.padded_vocab(place.tp),
        max_sequence_length=arch.max_positions,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="none",
    )
    model.position_embedding_type = "rope"
    model.rotary_pos_emb = Rotary(arch.rope, arch.head_dim, place.device)
    model.to(device=place.device, dtype=dtype)  # norms are made in float32 on the CPU, whatever the config says
    _mark_split(model)
    return model


def _mark_split(model: Policy) -> None:
    """Say which parameters are split over tensor-parallel ranks, as Megatron's initialisation would have.

    Gradient norms count a parameter without the mark once, as a duplicate.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            axis = 0
        elif isinstance(module, RowParallelLinear):
            axis = 1
        else:
            continue
        for param in module.parameters(recurse=False):
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, axis, 1


def transformer_config(arch: Architecture, place: Place, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=place.tp,
        pipeline_model_parallel_size=place.pp,
        use_cpu_initialization=place.device.type == "cpu",
        perform_initialization=False,
        # The loss is divided by the tokens of the whole batch before backward, so gradients are summed over
        # data-parallel ranks, never averaged; this is what makes Megatron do that.
        calculate_per_token_loss=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
