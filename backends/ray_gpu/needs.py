"""What real workers need of a GPU's memory, in place of what the scenario declares for the simulator.

A scenario's `memory` describes the job that it simulates. Real workers need what their model needs, so that is what the
scheduler is told; it can be known before anything starts:

trainer   parameters in the training type, and for each parameter a gradient, a master copy and Adam's two moments in
          fp32 (on a CPU the parameters are their own master copy); activations and logits of one micro-batch
engine    parameters in the serving type, the KV pool (`kv_tokens`), and on a GPU its graphs and workspace
residue   what a sleeping process keeps: on a GPU its CUDA context and communicators

Figures for a GPU were measured on an H200 with torch 2.11, SGLang 0.5.17 and Megatron-Core 0.19.2 (docs/gpu.md).
"""

from pathlib import Path
from typing import Any

import msgspec

from backends.ray_gpu.models import smollm2, tiny
from backends.ray_gpu.models.folder import read_json
from core.config import Job, Scenario
from core.model import MemoryNeeds, Role
from core.units import gib
from core.workload import SMOLLM2, TINY, Workload, settled

MIB = 1 << 20
BYTES = {"float32": 4, "bfloat16": 2}

CPU_RESIDUE = MIB
"""A sleeping CPU worker keeps a few kB of tensors on its slot."""
CUDA_RESIDUE = gib(1.5)
"""0.95-1.0 GiB for an engine asleep, 0.9 GiB for a trainer of one rank with small NCCL buffers, and some room."""
NCCL_OF_A_GROUP = gib(2)
"""Communicators of a trainer group of several ranks, with NCCL's usual buffers."""
ENGINE_WORK = gib(3)
"""Graphs, sampler and attention workspace of an awake engine."""
TRAINER_WORK = gib(1)
"""cuBLAS workspaces and what the allocator rounds up."""
LOGIT_BYTES = 12
"""For each logit: itself in the training type, in fp32, and its gradient."""
ACTIVATION_VALUES = 40
"""Values kept of each token and layer for the backward pass, in units of the hidden size (MLP included)."""


def adapted(scenario: Scenario, device: str, budget: int | None) -> Scenario:
    """The scenario as real workers will need it. `budget`: bytes of each logical GPU, if it is less than declared."""
    cluster = scenario.cluster
    if budget is not None and budget < cluster.gpu_memory:
        cluster = msgspec.structs.replace(cluster, gpu_memory=budget)
    jobs = tuple(_with_real_needs(job, device) for job in scenario.jobs)
    return msgspec.structs.replace(scenario, cluster=cluster, jobs=jobs)


def _with_real_needs(job: Job, device: str) -> Job:
    config = config_of(job.workload.model)
    if config is None:
        return job  # a model that is still on the hub: what was declared stands
    memory = needs_of(job, device, config)
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, memory=memory))


def config_of(model: str) -> dict[str, Any] | None:
    """A model's configuration, as far as it can be had without fetching anything."""
    if model == TINY:
        return dict(tiny.config())
    if model == SMOLLM2:
        return smollm2.CONFIG
    folder = Path(model).expanduser()
    return read_json(folder / "config.json", model) if folder.is_dir() else None


def needs_of(job: Job, device: str, config: dict[str, Any]) -> MemoryNeeds:
    """Bytes on each GPU that the job uses."""
    workload = settled(job.workload, device)
    on_gpu = device == "cuda"
    group = job.spec.group(Role.ACTOR_TRAIN)
    assert group is not None
    residue = CUDA_RESIDUE + (NCCL_OF_A_GROUP if len(group.gpus) > 1 else 0) if on_gpu else CPU_RESIDUE
    train = residue + trainer_bytes(config, workload, group.tp, on_gpu)
    engine = residue + engine_bytes(config, workload, job.spec.infer.tp, on_gpu)
    cache = parameters(config) * BYTES[workload.dtype or "float32"] + MIB
    return MemoryNeeds(train=train, engine=engine, residue=residue, init_peak=train + engine, host_cache=cache)


def parameters(config: dict[str, Any]) -> int:
    """Parameters of a Llama or Qwen of this configuration."""
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv, size = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * size + 2 * hidden * kv * size
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * layer + hidden


def trainer_bytes(config: dict[str, Any], workload: Workload, tp: int, on_gpu: bool) -> int:
    """What an onloaded trainer adds to its residue, on each GPU."""
    count = parameters(config)
    width = BYTES[workload.dtype or "float32"]
    reference = width if workload.kl else 0
    state = count * ((width + 4 + 4 + 8 if on_gpu else 4 + 4 + 8) + reference)
    if not on_gpu:
        return state + MIB
    tokens = workload.micro_batch_tokens
    logits = tokens * config["vocab_size"] * LOGIT_BYTES
    activations = tokens * config["hidden_size"] * config["num_hidden_layers"] * ACTIVATION_VALUES * width
    return (state + logits + activations) // tp + TRAINER_WORK


def engine_bytes(config: dict[str, Any], workload: Workload, tp: int, on_gpu: bool) -> int:
    """What an awake engine adds to its residue, on each GPU."""
    width = BYTES[workload.dtype or "float32"]
    heads = config["num_attention_heads"]
    kv = max(tp, config.get("num_key_value_heads") or heads)
    size = config.get("head_dim") or config["hidden_size"] // heads
    pool = 2 * config["num_hidden_layers"] * kv * size * width * workload.kv_tokens
    return (parameters(config) * width + pool) // tp + (ENGINE_WORK if on_gpu else MIB)
