"""The engine interface: what an engine actor may ask of whatever generates tokens.

Rules of this room, kept by every engine:

1. `generate` always ends: completed, aborted with what it has, or failed with a reason. All it raises is what cancelled
   it.
2. An engine serves only while all of `TAGS` are awake and its weights are whole: it never answers with garbage.
3. `version` is set last. A failed or half-done update leaves -1, and the same update can be tried again.
4. `resident_bytes` are bytes of tensors that exist, never of what was asked for. Before memory is taken, the engine
   tells its `Hold`; when that raises `OutOfMemory`, nothing was allocated.
5. Control coroutines (sleep, wake, update ...) are carried out one after another; `generate` runs beside them, in a
   thread or process of its own, so that control stays responsive.

Nothing heavy is imported here: the driver knows these records too.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from backends.ray_gpu.weights.manifest import Manifest
from backends.ray_gpu.weights.transports import Meeting
from core.model import Record

TAGS = ("weights", "kv_cache", "graphs")

Hold = Callable[[str, int], None]
"""`hold(tag, nbytes)`: from now on `tag` holds `nbytes` in all. Raises `OutOfMemory` when there is no room for them,
and never when they got fewer. Tags are `TAGS`, and `residue` for what an engine keeps while all of them sleep."""


class GenerateRequest(Record, frozen=True, kw_only=True):
    id: str
    """For messages only; two requests may share one."""
    input_ids: tuple[int, ...]
    """The prompt; for a resumed trajectory the prompt and the tokens so far."""
    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Key of the draws; an engine that can makes the result a function of the request and the weights alone."""
    stop_ids: tuple[int, ...] = ()


class GenerateResult(Record, frozen=True, kw_only=True):
    status: Literal["completed", "aborted", "failed"]
    token_ids: tuple[int, ...] = ()
    """New ones only; the stop token is the last of them if there was one."""
    logprobs: tuple[float, ...] = ()
    """One for each new token: natural logarithm of its probability at the request's temperature (at 1 if greedy), over
    the whole vocabulary, before `top_p` cuts it. That is the denominator of GRPO's ratio: a trainer that recomputes it
    from the same weights gets the same number."""
    reason: str = ""
    """Why it failed or was aborted."""


class EngineConfig(Record, frozen=True, kw_only=True):
    model: str
    """A local folder in the Hugging Face layout."""
    kv_tokens: int
    """Size of the KV pool in tokens; never a fraction of a device that others share."""
    max_running: int
    """Requests decoded together; more of them queue inside."""
    tp: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    port: int = 0
    """First of the ports the engine may use; 0: it needs none."""
    gpus: tuple[int, ...] = ()
    """Its bundle: logical GPU ids, in rank order."""


class Engine(Protocol):
    """One data-parallel rank. All coroutines are called on one event loop."""

    version: int
    """Of the weights loaded; -1: those of the model folder, or none that are whole."""

    async def start(self) -> None:
        """Load. Ends awake, with the weights of the model folder. Raises `ConfigError` for a model that it cannot run,
        `OutOfMemory`, or `OperationFailed`."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Always ends. Cancelling the coroutine aborts the request."""
        ...

    async def abort(self) -> None:
        """End every request in flight as `aborted`, with what it has; returns when the engine is idle. Whatever is
        asked for meanwhile ends as `aborted` at once."""
        ...

    async def drain(self, limit_s: float) -> None:
        """Wait for the requests in flight, at most `limit_s` seconds, then abort the rest; returns when idle. Whatever
        is asked for meanwhile ends as `aborted` at once, and so may what is queued and has not begun."""
        ...

    async def sleep(self, tags: tuple[str, ...] = TAGS) -> None:
        """Release the memory of `tags`. Raises `OperationFailed` unless idle. A tag that sleeps is left alone."""
        ...

    async def wake(self, tags: tuple[str, ...] = TAGS) -> None:
        """Take the memory of `tags` back, all or nothing. Woken weights are garbage until `update_weights`. Raises
        `OutOfMemory` (nothing changed). A tag that is awake is left alone."""
        ...

    async def update_weights(self, manifest: Manifest, version: int, verify: bool) -> None:
        """Load all parameters from the node's cache, every bucket's checksum checked; `verify`: then compare tensor by
        tensor. Raises `OperationFailed` (weights asleep, requests in flight, a checksum, name or shape that does not
        match)."""
        ...

    def ipc_label(self, manifest: Manifest) -> str:
        """What the trainer is to write beside the handles that it exports for this engine
        (`weights.transports.export_handles`)."""
        ...

    async def update_weights_ipc(
        self, payloads: Sequence[bytes], manifest: Manifest, version: int, digest: int, verify: bool
    ) -> None:
        """As `update_weights`, from handles to the trainer's memory, a payload for each rank. The trainer keeps that
        memory until this returns. `manifest` says what lies where in it; raises `OperationFailed` also if the bytes do
        not have the trainer's `digest` (`weights.staged`). `verify`: then compare with the published copy."""
        ...

    async def join(self, meeting: Meeting) -> None:
        """Form a process group with the trainer, for broadcasts. It outlives sleep. Raises `OperationFailed`."""
        ...

    async def leave(self) -> None:
        """Give the group up, whatever state it is in; a no-op without one."""
        ...

    async def update_weights_broadcast(self, manifest: Manifest, version: int, digest: int, verify: bool) -> None:
        """As `update_weights_ipc`, from the trainer's broadcast in the group, which it must be sending meanwhile."""
        ...

    async def fingerprint(self) -> dict[str, int]:
        """Checksum (`weights.checksum`) of every parameter as loaded, by its name in the model folder."""
        ...

    def resident_bytes(self) -> dict[str, int]:
        """Bytes resident by tag, and `residue`: what is kept while all tags sleep."""
        ...

    def pids(self) -> tuple[int, ...]:
        """Every process of it, its children included."""
        ...

    async def close(self) -> None:
        """Abort everything and free everything; nothing is left. Also after a failed start, also twice."""
        ...
