"""What runs inside SGLang's own processes: the way in, and the errands that the engine sends there.

SGLang loads a model in child processes, one for each tensor-parallel rank. Rules of this room:

1. Children are entered through `SCHEDULER` and `DETOKENIZER`. Unpickling an entry adjusts what must be adjusted before
   SGLang is imported, so no installed file of SGLang or transformers needs a patch.
2. An errand is one record sent through SGLang's own door for custom weight loaders; each rank answers in a file of its
   own. An errand never raises into the scheduler: SGLang ends its whole process tree for any exception there.
3. Weights are read from the node's cache files where they lie. Only their names travel.

Nothing heavy is imported at import: both sides share the records.
"""

import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.ray_gpu.weights.manifest import Bucket, Manifest, TensorEntry
from backends.ray_gpu.weights.transports import Meeting, close_group, join_group, receive
from core.errors import OperationFailed
from core.model import Record

DOOR = f"{__name__}.run_errand"
"""Name of the custom weight loader, for SGLang's `custom_weight_loader` and `load_format`."""

# Parameters that SGLang keeps fused: ending there, endings in the model folder, in the order of their rows.
FUSED = (
    (".qkv_proj.", (".q_proj.", ".k_proj.", ".v_proj.")),
    (".gate_up_proj.", (".gate_proj.", ".up_proj.")),
)
# What a model that ties its head to its embedding does not hold under this name.
TIED_HEAD = "lm_head.weight"


class Errand(Record, frozen=True, kw_only=True):
    """What the engine wants done in every rank."""

    what: Literal["load", "take", "join", "receive", "leave", "fingerprint"]
    replies: str
    """Directory for the answers, one file a rank."""
    manifest: Manifest | None = None
    """All but `join` and `leave` are about one."""
    meeting: Meeting | None = None
    """For `join`."""

    def __str__(self) -> str:
        return f"{self.what} {self.manifest}" if self.manifest is not None else self.what


class Reply(Record, frozen=True, kw_only=True):
    rank: int
    error: str = ""
    seconds: float = 0.0
    checksums: dict[str, int] = msgspec.field(default_factory=dict)
    """For `fingerprint`: by name in the model folder; from rank 0 alone."""
    digest: int = 0
    """For `take` and `receive`: of the bytes that this rank was given."""


def send(errand: Errand) -> str:
    return msgspec.json.encode(errand).decode()


def replies(errand: Errand, ranks: int) -> list[Reply]:
    """The answers of all ranks. Raises OperationFailed if one is missing or says that it failed."""
    files = [_reply_file(errand, rank) for rank in range(ranks)]
    for rank, file in enumerate(files):
        if not file.exists():
            raise OperationFailed(f"rank {rank} did not answer the errand: {errand}")
    found = [msgspec.json.decode(file.read_bytes(), type=Reply) for file in files]
    for file in files:
        file.unlink()
    for reply in found:
        if reply.error:
            raise OperationFailed(f"rank {reply.rank} could not {errand}: {reply.error}")
    return found


def _reply_file(errand: Errand, rank: int) -> Path:
    return Path(errand.replies) / f"{errand.what}.{rank}.json"


# --- the errands, run in a scheduler process ------------------------------------------------------------------------


GROUP: list[Any] = []
"""The process group of this rank with the trainer, if there is one."""


def run_errand(model: Any, named: list[tuple[str, Any]]) -> None:
    """SGLang's custom weight loader: the first name in `named` is the errand. For `take` the tensors are the buckets;
    else there is one, which means nothing."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    errand = msgspec.json.decode(named[0][0], type=Errand)
    rank, began = get_tensor_model_parallel_rank(), time.perf_counter()
    reply = Reply(rank=rank)
    try:
        reply = _run(errand, rank, model, [tensor for _, tensor in named])
    except Exception as failure:  # rule 2: whatever it is, it must not reach the scheduler
        reply = Reply(rank=rank, error=f"{type(failure).__name__}: {failure}")
    reply = msgspec.structs.replace(reply, seconds=time.perf_counter() - began)
    file = _reply_file(errand, rank)
    half = file.with_suffix(".half")
    half.write_bytes(msgspec.json.encode(reply))
    half.rename(file)


def _run(errand: Errand, rank: int, model: Any, tensors: list[Any]) -> Reply:
    match errand.what, errand.manifest:
        case "join", _:
            assert errand.meeting is not None
            GROUP.append(join_group(errand.meeting, 1 + rank))
        case "leave", _:
            while GROUP:
                close_group(GROUP.pop(), broken=True)
        case "load", Manifest() as manifest:
            load(model, manifest, lambda bucket, device: mapped(bucket).to(device))
        case "take", Manifest() as manifest:
            return Reply(rank=rank, digest=load_and_digest(model, manifest, iter(tensors)))
        case "receive", Manifest() as manifest:
            sizes = [bucket.nbytes for bucket in manifest.buckets]
            arriving = receive(sizes, GROUP[0], next(model.parameters()).device)
            return Reply(rank=rank, digest=load_and_digest(model, manifest, arriving))
        case "fingerprint", Manifest() as manifest:
            checksums = fingerprint(model, manifest)
            return Reply(rank=rank, checksums=checksums if rank == 0 else {})
    return Reply(rank=rank)


def load_and_digest(model: Any, manifest: Manifest, buckets: Iterator[Any]) -> int:
    """Load buckets as they come, and take the digest of each after it was read: what changed meanwhile would show."""
    from backends.ray_gpu.weights.staged import digest

    read: list[int] = []

    def next_one(bucket: Bucket, device: Any) -> Any:
        return next(buckets)

    load(model, manifest, next_one, lambda flat: read.append(digest([flat])))
    return sum(read) % 2**64


def load(
    model: Any,
    manifest: Manifest,
    fetch: Callable[[Bucket, Any], Any],
    after: Callable[[Any], None] = lambda flat: None,
) -> None:
    """Load every parameter of `manifest`, and check first that together they are exactly the model's.

    `fetch` gives a bucket as one flat tensor on a device; SGLang's own loaders then cut it into what this rank keeps.
    `after` is told each when it was read.
    """
    import torch

    parameters = dict(model.named_parameters())
    check_names(manifest.names, set(parameters))
    device = next(iter(parameters.values())).device
    for bucket in manifest.buckets:
        flat = fetch(bucket, device)
        model.load_weights(_tensors(bucket, flat))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copy on the device is gone before the next one is made
        after(flat)
        del flat


def check_names(names: tuple[str, ...], parameters: set[str]) -> None:
    """Raise OperationFailed unless tensors of these `names` fill exactly these `parameters`."""
    wanted = {home(name)[0]: name for name in names if name in parameters or name != TIED_HEAD}
    strange = sorted(name for parameter, name in wanted.items() if parameter not in parameters)
    missing = sorted(parameters - set(wanted))
    parts = {part for name in names for part in [home(name)] if part[0] in parameters}
    missing += sorted(
        f"{parameter} (part {index} of {len(_endings(parameter))})"
        for parameter in parameters & set(wanted)
        for index in range(len(_endings(parameter)))
        if (parameter, index) not in parts
    )
    if strange or missing:
        raise OperationFailed(f"the weights are not this model's: {_some(strange)} unknown, {_some(missing)} missing")


def home(name: str) -> tuple[str, int]:
    """Where SGLang keeps a tensor of the model folder: its parameter, and which part of it."""
    for fused, endings in FUSED:
        for index, ending in enumerate(endings):
            if ending in name:
                return name.replace(ending, fused), index
    return name, 0


def _endings(parameter: str) -> tuple[str, ...]:
    return next((endings for fused, endings in FUSED if fused in parameter), ("",))


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def mapped(bucket: Bucket) -> Any:
    """A bucket as one flat CPU tensor of bytes, in the cache file itself; unmapped with the last tensor on it."""
    import torch

    handle = os.open(bucket.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Populated at once: 4 KiB at a time, the page faults would cost more than the copy that follows.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = mmap.mmap(handle, bucket.nbytes, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(handle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch would rather have memory that it may write to
        return torch.frombuffer(memory, dtype=torch.uint8)


def _tensors(bucket: Bucket, flat: Any) -> Iterator[tuple[str, Any]]:
    for entry in bucket.tensors:
        yield entry.name, view(flat, entry)


def view(flat: Any, entry: TensorEntry) -> Any:
    """A tensor of a bucket, on the bucket's device, without a copy."""
    import torch

    part = flat[entry.offset : entry.offset + entry.nbytes]
    return part.view(getattr(torch, entry.dtype)).reshape(entry.shape)


def fingerprint(model: Any, manifest: Manifest) -> dict[str, int]:
    """Checksum of each tensor of `manifest` as this model holds it, put together again from all ranks.

    Collective: all ranks run through it in the same order. Equal to the checksum of the tensor's bytes in the cache if
    the model holds the same type; one that it holds as another type is turned back first, which may lose bits.
    """
    import torch

    from backends.ray_gpu.weights.checksum import checksum

    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    found: dict[str, int] = {}
    for bucket in manifest.buckets:
        for entry in bucket.tensors:
            parameter, part = home(entry.name)
            if parameter not in parameters:
                continue  # a tied head: the model holds it under the embedding's name
            owner = modules[parameter.rpartition(".")[0]]
            shard = parameters[parameter].detach().split(part_rows(owner, parameters[parameter].shape[0]))[part]
            whole = _whole(shard, entry.shape).to(getattr(torch, entry.dtype)).cpu().contiguous()
            found[entry.name] = checksum(memoryview(whole.view(torch.uint8).reshape(-1).numpy()))
    return found


def part_rows(owner: Any, rows: int) -> list[int]:
    """Rows of each part of a parameter of `owner` on this rank; `rows` in all."""
    if hasattr(owner, "q_proj_shard_size"):
        return [owner.q_proj_shard_size, owner.kv_proj_shard_size, owner.v_proj_shard_size]
    sizes = getattr(owner, "output_sizes", None) or [rows]
    return [rows * size // sum(sizes) for size in sizes]


def _whole(shard: Any, shape: tuple[int, ...]) -> Any:
    """The tensor that the ranks hold shards of: `shape`, at least, in the end."""
    import torch
    from sglang.srt.distributed import get_tensor_model_parallel_world_size, get_tp_group

    ranks = get_tensor_model_parallel_world_size()
    if ranks > 1 and tuple(shard.shape) != shape:
        everyone = [torch.empty_like(shard) for _ in range(ranks)]
        torch.distributed.all_gather(everyone, shard.contiguous(), group=get_tp_group().device_group)
        shard = join(everyone, shape)
    # An embedding may be padded to a round number of rows.
    return shard[: shape[0]]


def join(shards: list[Any], shape: tuple[int, ...]) -> Any:
    """Shards of all ranks put together to `shape`. Heads fewer than ranks are there more than once: one of each."""
    import torch

    dim = next(dim for dim, size in enumerate(shape) if shards[0].shape[dim] != size)
    copies = max(1, shards[0].shape[dim] * len(shards) // shape[dim]) if dim == 0 else 1
    return torch.cat(shards[::copies], dim=dim)


# --- the way in -----------------------------------------------------------------------------------------------------


class Entry:
    """A function for SGLang to start a child with. Unpickling it in the child comes before SGLang is imported there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], Callable[..., None]], tuple[str]]:
        return enter, (self.name,)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        enter(self.name)(*args, **kwargs)


SCHEDULER, DETOKENIZER = Entry("scheduler"), Entry("detokenizer")


def enter(name: str) -> Callable[..., None]:
    """Make this process ready, and give what runs in it."""
    allow_known_architectures()
    if name == "detokenizer":
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

        return run_detokenizer_process
    return run_scheduler


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process, without multicast, with a seed for each request, ending each where it asks."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    forbid_multicast()
    seed_each_request()
    stop_where_told()
    run_scheduler_process(*args, **kwargs)


def allow_known_architectures() -> None:
    """Let SGLang register configurations that a newer transformers already has: its import fails otherwise."""
    from transformers import AutoConfig

    register = AutoConfig.register
    if getattr(register, "is_forgiving", False):
        return

    def forgiving(model_type: str, config: Any, exist_ok: bool = True) -> None:
        register(model_type, config, exist_ok=True)

    forgiving.is_forgiving = True  # type: ignore[attr-defined]
    AutoConfig.register = staticmethod(forgiving)  # type: ignore[method-assign]


def forbid_multicast() -> None:
    """Keep the logits' all-gather on NCCL. With `tp` above 1 SGLang would build a buffer in NVLink multicast for it and
    has no option against that; a program that uses multicast can put the GPUs of a whole host out of service."""
    from sglang.srt.distributed.device_communicators.triton_symm_mem_ag import MultimemAllGatherer

    build = MultimemAllGatherer.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **{**kwargs, "enabled": False})

    MultimemAllGatherer.__init__ = without  # type: ignore[method-assign]


def seed_each_request() -> None:
    """Draw each token from its request's own seed and its position in the sequence.

    SGLang hands its sampler the seeds only together with batch-invariant kernels, which cost speed, and its own keyed
    draw is compiled at the first token. Without those kernels the logits still depend on the batch in their last bits;
    the draws no longer do.
    """
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from backends.ray_gpu.engines.draws import draw

    build = SamplingBatchInfo.from_schedule_batch.__func__  # type: ignore[attr-defined]

    def seeded(cls: type, batch: Any, vocab_size: int) -> Any:
        info = build(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(seeded)  # type: ignore[method-assign]
    sampler.multinomial_with_seed = draw


def stop_where_told() -> None:
    """End a request at its own stop tokens only. SGLang would add the model's end tokens, wherever it finds some, and
    its option `ignore_eos` leaves the request's own out too."""
    from sglang.srt.configs.model_config import ModelConfig

    ModelConfig._get_hf_eos_token_id = lambda self: None  # type: ignore[method-assign]
