"""What SGLang is started with: its environment, its options, and what it will need. Plain functions, nothing imported.

Every option here is one that was tried on the hardware; a caller may overrule them (`SglangEngine(flags=...)`), but not
those of `FORBIDDEN`: NVLink multicast can put all GPUs of a host out of service, for everybody who uses it.
"""

import json
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.ray_gpu.engines.base import EngineConfig
from core.errors import ConfigError

MEMORY_CEILING = 0.95
"""Share of the GPU's memory free at the start beyond which SGLang refuses `kv_tokens`. It sizes nothing."""
GRAPH_BATCH_MAX = 256
"""Largest batch that a CUDA graph is captured for: each one costs start-up time and memory."""
FORBIDDEN = ("enable_symm_mem", "enable_torch_symm_mem", "enable_nccl_nvls")
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# SGLang sets this for itself where it is unset. A trainer that broadcasts weights to it must have the same, or rank 0
# hangs and the others fail with "invalid argument".
NCCL_BOTH_SIDES = {"NCCL_CUMEM_ENABLE": "0"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def environment(device: str, cache: str = "") -> dict[str, str]:
    """Variables that an engine's process needs before it imports anything (a Ray actor: `runtime_env`'s `env_vars`).

    `cache`: a folder that keeps compiled kernels from one start to the next (empty: the libraries' own defaults). Which
    GPUs it sees is not in here (`devices.cuda_map`), nor `TMPDIR`, where its sockets lie: give it a short one that is
    removed after the run, so that nothing is left of an engine that was killed.
    """
    found = {
        "HF_HUB_OFFLINE": "1",  # models are local folders; a look at the hub would cost a time-out
        "TOKENIZERS_PARALLELISM": "false",
        **LOOPBACK,
    }
    if device == "cpu":
        return found | {"SGLANG_USE_CPU_ENGINE": "1"}
    found |= NO_MULTICAST | NCCL_BOTH_SIDES
    # The same kernels everywhere: flashinfer compiles its own on first use, where it can.
    found["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    if cache:
        found |= {"TRITON_CACHE_DIR": f"{cache}/triton", "TVM_FFI_CACHE_DIR": f"{cache}/tvm_ffi"}
    return found


def cuda_libraries() -> list[str]:
    """Folders with the CUDA libraries that came with torch as packages; empty where CUDA is installed otherwise."""
    folders = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/lib")
    return sorted(str(folder) for folder in folders if any(folder.glob("*.so*")))


def other_models(sources: Path, architectures: Sequence[str]) -> str:
    """Modules of SGLang's model folder that define none of `architectures`, for its SGLANG_DISABLED_MODEL_ARCHS: it
    imports all of them otherwise, in each of its processes. Empty, which disables nothing, if no module defines one."""
    wanted = [f"class {name}(" for name in architectures]
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted(sources.glob("*.py"))}
    needed = {name for name, text in files.items() if any(line in text for line in wanted)}
    return ",".join(name for name in files if name not in needed) if needed else ""


def launch_flags(config: EngineConfig) -> dict[str, Any]:
    """Options of SGLang's offline engine."""
    flags: dict[str, Any] = {
        "model_path": config.model,
        "dtype": config.dtype,
        "tp_size": config.tp,
        "device": config.device,
        "random_seed": config.seed,
        "max_total_tokens": config.kv_tokens,
        "max_running_requests": config.max_running,
        "mem_fraction_static": MEMORY_CEILING,
        "skip_tokenizer_init": True,  # token ids come in and go out; what they mean is the pipeline's business
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",  # the one that draws by a request's own seed
        "grammar_backend": "none",
        "sleep_on_idle": True,  # an idle scheduler would spin on a core, and most engines sleep most of the time
        "host": "127.0.0.1",
        "log_level": "warning",
    }
    if config.port:
        flags |= {"port": config.port, "nccl_port": config.port + 1}
    if config.device == "cpu":
        return flags | {"attention_backend": "torch_native", "disable_cuda_graph": True, "mem_fraction_static": 0.5}
    return flags | {
        "attention_backend": "triton",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": min(config.max_running, GRAPH_BATCH_MAX),
        "disable_custom_all_reduce": True,  # its kernels for several GPUs can use multicast
        "enable_memory_saver": True,
    }


def merged_flags(config: EngineConfig, overruled: Mapping[str, Any]) -> dict[str, Any]:
    """`launch_flags` with a caller's own on top. Raises ConfigError for one that nobody may set."""
    for name in FORBIDDEN:
        if overruled.get(name):
            raise ConfigError("SGLang", f"{name} uses NVLink multicast, which stays off", "leave it out")
    if overruled.get("disable_custom_all_reduce") is False:
        raise ConfigError("SGLang", "its custom all-reduce can use NVLink multicast, which stays off", "leave it out")
    return launch_flags(config) | dict(overruled)


def check_model(config: EngineConfig) -> dict[str, Any]:
    """The model's `config.json`. Raises ConfigError, before anything heavy starts, for a folder that cannot work."""
    file = Path(config.model) / "config.json"
    if not file.is_file():
        raise ConfigError(
            "model", f"{config.model} holds no config.json", "name a local folder in the Hugging Face layout"
        )
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", f"{file} is not JSON: {error}") from error
    heads = model.get("num_attention_heads", config.tp)
    if heads % config.tp:
        raise ConfigError(
            "model", f"{heads} attention heads cannot be split over {config.tp} GPUs", "choose another tp"
        )
    if not any(Path(config.model).glob("*.safetensors")):
        raise ConfigError("model", f"{config.model} holds no *.safetensors", "convert its weights to that format")
    return model


def planned_bytes(config: EngineConfig) -> dict[str, int]:
    """Bytes by tag that the GPUs of the bundle will hold together, as far as that is known before the start.

    Weights: what the files hold, in the engine's type. Pool: for each token a key and a value of every layer,
    `2 x layers x KV heads x head size` numbers; KV heads fewer than GPUs are held several times.
    """
    model = check_model(config)
    size = BYTES_OF[config.dtype]
    stored = sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors"))
    stored_as = BYTES_OF.get(str(model.get("dtype") or model.get("torch_dtype") or "float32"), 4)
    heads = model["num_attention_heads"]
    kv_heads = max(config.tp, model.get("num_key_value_heads") or heads)
    head_size = model.get("head_dim") or model["hidden_size"] // heads
    per_token = 2 * model["num_hidden_layers"] * kv_heads * head_size * size
    return {"weights": stored * size // stored_as, "kv_cache": config.kv_tokens * per_token, "graphs": 0}
