"""A Hugging Face causal language model whose weights can be taken away and given back, and its two forward passes.

Parameters are the only weights: buffers (rotary frequencies) are no part of a published version, so they stay while the
model sleeps, and count as residue. All parameters lie in one slab: what is freed goes back to the system as one piece,
where many pieces would stay in the allocator's heap (measured with 538 MB: 525 of them stayed).
"""

import inspect
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from backends.ray_gpu.engines.base import EngineConfig
from backends.ray_gpu.engines.hf_kv import KvPool
from backends.ray_gpu.weights.checksum import checksum
from backends.ray_gpu.weights.manifest import Manifest
from backends.ray_gpu.weights.reader import compare
from backends.ray_gpu.weights.writer import bytes_of
from core.errors import ConfigError, OperationFailed


class HFModel:
    """The model in the folder that `config` names, not loaded yet. Raises ConfigError if it cannot be run."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = config.model
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._config = _read_config(config.model)
        with torch.device("meta"):
            self._module: PreTrainedModel = AutoModelForCausalLM.from_config(self._config, dtype=self._dtype)
        self._shapes = [parameter.shape for parameter in self._module.parameters()]
        self._slab: torch.Tensor | None = None
        self._keyword = _cache_keyword(self._module)

    @property
    def vocabulary(self) -> int:
        return self._module.get_input_embeddings().num_embeddings

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model was made for."""
        return self._config.max_position_embeddings

    @property
    def nbytes(self) -> int:
        """Of all parameters, when they are allocated; a tied one counts once."""
        return sum(shape.numel() for shape in self._shapes) * self._dtype.itemsize

    @property
    def residue(self) -> int:
        """Bytes of the buffers, which stay."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._module.buffers())

    @property
    def resident(self) -> int:
        """Bytes of the parameters that exist."""
        return 0 if self._slab is None else self._slab.untyped_storage().nbytes()

    def pool(self, tokens: int) -> KvPool:
        """A KV pool for this model, not allocated."""
        config = self._config
        heads = config.num_key_value_heads or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KvPool(config.num_hidden_layers, heads, dim, tokens, self._dtype)

    def load(self) -> None:
        """Read the weights of the folder."""
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self._module = AutoModelForCausalLM.from_pretrained(
            self._folder, config=self._config, dtype=self._dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        as_read = [parameter.data for parameter in self._module.requires_grad_(False).parameters()]
        self.allocate()
        for parameter in self._module.parameters():
            parameter.data.copy_(as_read.pop(0))

    def free(self) -> None:
        if self._slab is not None:
            self._slab = None
            for parameter in self._module.parameters():
                parameter.data = torch.empty(0, dtype=self._dtype)

    def allocate(self) -> None:
        """Parameters of no particular value."""
        self._slab = torch.empty(self.nbytes // self._dtype.itemsize, dtype=self._dtype)
        pieces = self._slab.split([shape.numel() for shape in self._shapes])
        for parameter, piece, shape in zip(self._module.parameters(), pieces, self._shapes, strict=True):
            parameter.data = piece.view(shape)

    def update(self, manifest: Manifest, named: Iterable[tuple[str, torch.Tensor]], verify: bool) -> None:
        """Copy in the tensors of a published version, wherever they come from; of the cache's, every bucket is checked
        before anything of it is used (`read`).

        Raises OperationFailed, the model half-loaded, if they are damaged or not this model's; `verify`: also if what
        was loaded then differs from the published copy in any bit.
        """
        own = dict(self._module.named_parameters(remove_duplicate=False))
        missing = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for name, tensor in named:
            parameter = own.get(name)
            if parameter is None:
                raise OperationFailed(f"{manifest} has {name}, which the model in {self._folder} has not")
            if parameter.shape != tensor.shape:
                raise OperationFailed(
                    f"{name} of {manifest} has the shape {list(tensor.shape)}, not {list(parameter.shape)}"
                )
            parameter.data.copy_(tensor)
            missing.pop(id(parameter), None)
        if missing:
            raise OperationFailed(f"{manifest} lacks {', '.join(missing.values())}")
        if verify:
            compare(manifest, own)

    def fingerprint(self) -> dict[str, int]:
        return {name: checksum(bytes_of(parameter)) for name, parameter in self._module.named_parameters()}

    @torch.inference_mode()
    def prefill(self, sequences: list[tuple[int, ...]], pool: KvPool, first: int) -> torch.Tensor:
        """Read whole sequences into rows of `pool`, from `first` on; logits after each, as (sequences, vocabulary).

        Shorter ones are padded at the end, where the causal mask hides the padding from every real token; with their
        own last token, because what it leaves in the pool must be as finite as the rest.
        """
        lengths = [len(sequence) for sequence in sequences]
        longest = max(lengths)
        tokens = torch.tensor([[*sequence, *sequence[-1:] * (longest - len(sequence))] for sequence in sequences])
        ends, which = torch.tensor([length - 1 for length in lengths]).unique(return_inverse=True)
        pool.prefill(first)
        mask = torch.ones(1, 1, longest, longest, dtype=torch.bool).tril()
        logits = self._forward(tokens, torch.arange(longest)[None], mask, pool, ends)
        return logits[torch.arange(len(sequences)), which]

    @torch.inference_mode()
    def decode(self, tokens: list[int], positions: list[int], pool: KvPool) -> torch.Tensor:
        """One more token for each row of `pool` from 0 on; the logits after it (rows, vocabulary)."""
        at = torch.tensor(positions)
        pool.decode(at)
        seen = torch.arange(int(at.max()) + 1)[None] <= at[:, None]
        return self._forward(torch.tensor(tokens)[:, None], at[:, None], seen[:, None, None], pool, 1)[:, 0]

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, pool: KvPool, keep: torch.Tensor | int
    ) -> torch.Tensor:
        output = self._module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **{self._keyword: pool.cache},
        )
        return output.logits


def _read_config(folder: str) -> PreTrainedConfig:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(folder, "no model is here (no config.json)", "name a folder in the Hugging Face layout")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(folder, f"transformers cannot read the model: {error}") from error
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds or config.is_encoder_decoder:
        what = ", ".join(kinds) or "an encoder"
        raise ConfigError(folder, f"the CPU engine runs decoders with full attention only, and this model has {what}")
    return config


def _cache_keyword(module: PreTrainedModel) -> str:
    """What the model calls its cache; transformers 5.20 began to rename it."""
    return "cache" if "cache" in inspect.signature(module.base_model.forward).parameters else "past_key_values"
