"""Log-probabilities of given tokens from logits whose vocabulary is split over tensor-parallel ranks.

Only positions that predict a generated token are turned into float32: prompts and padding cost no vocabulary-wide
float32 memory. Columns that only pad the vocabulary are taken out before the normalisation.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def log_probs(logits: Tensor, where: Tensor, targets: Tensor, *, vocab: int, temperature: float) -> Tensor:
    """[n] float32, differentiable: log softmax(logits / temperature) of `targets` at the flat positions `where`.

    `logits` is [b, s, v]: this rank's v columns of the padded vocabulary, of which `vocab` are real over all ranks.
    `where` and `targets` are [n] int64. The result is the same on every tensor-parallel rank.
    """
    chosen = logits.flatten(0, 1).index_select(0, where).float() / temperature
    rank = parallel_state.get_tensor_model_parallel_rank()
    real = max(0, min(chosen.shape[1], vocab - rank * chosen.shape[1]))
    if real < chosen.shape[1]:
        padding = torch.arange(chosen.shape[1], device=chosen.device) >= real
        chosen = chosen.masked_fill(padding, torch.finfo(chosen.dtype).min)
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        # Without a collective: on CUDA even one over a single rank would make NCCL set up a communicator.
        return chosen.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -vocab_parallel_cross_entropy(chosen, targets)
