"""The CPU engine: a transformers model, decoded by a thread of this process.

It is what CI and newcomers run, so it keeps every rule of `base` that the GPU engine keeps, memory included: sleeping
tensors are really freed, and are announced to `hold` before they are made again. (`graphs` are a GPU's; here they take
no bytes.)
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from backends.ray_gpu.engines.base import TAGS, EngineConfig, GenerateRequest, GenerateResult, Hold
from backends.ray_gpu.engines.hf_batch import Batch, Ticket
from backends.ray_gpu.engines.hf_kv import KvPool
from backends.ray_gpu.engines.hf_model import HFModel
from backends.ray_gpu.weights.manifest import Manifest
from backends.ray_gpu.weights.reader import read
from backends.ray_gpu.weights.staged import digest, tensors
from backends.ray_gpu.weights.transports import Meeting, close_group, join_group, open_handles, receive
from core.errors import ConfigError, OperationFailed, OutOfMemory

T = TypeVar("T")


class HFEngine:
    """One data-parallel rank; see `base.Engine`. `hold` hears of memory before it is taken, from a thread."""

    def __init__(self, config: EngineConfig, hold: Hold = lambda tag, nbytes: None) -> None:
        if config.device != "cpu" or config.tp != 1:
            raise ConfigError("engine", "the transformers engine runs on the CPU, with tp 1", "use SGLang on GPUs")
        if config.kv_tokens < 1 or config.max_running < 1:
            raise ConfigError("engine", "kv_tokens and max_running must be at least 1")
        self.version = -1
        self._config = config
        self._hold = hold
        self._model: HFModel | None = None
        self._pool: KvPool | None = None
        self._batch: Batch | None = None
        self._awake: set[str] = set()
        self._whole = False
        """The weights are one version's, or the folder's: not garbage, not half-loaded."""
        self._control = asyncio.Lock()
        self._group: Any = None
        """Process group with the trainer, if one was formed."""
        self._in_flight: dict[Ticket, asyncio.Future[GenerateResult]] = {}
        self._held_back = 0
        """How many aborts and drains are under way."""

    async def start(self) -> None:
        async with self._control:
            if self._batch is not None:
                raise OperationFailed("the engine was started already")
            try:
                await _in_thread(self._build)
            except BaseException:
                self._free_all()
                raise
            self._batch = Batch(self._model, self._pool, self._config.max_running)
            self._awake, self._whole = set(TAGS), True

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if reason := self._refusal(request):
            return GenerateResult(status="failed", reason=reason)
        if self._held_back:
            return GenerateResult(status="aborted", reason="the engine is being emptied")
        if request.max_new_tokens <= 0:
            return GenerateResult(status="completed")
        loop = asyncio.get_running_loop()
        ticket = Ticket(request, lambda *ended: loop.call_soon_threadsafe(self._ended, *ended))
        self._in_flight[ticket] = future = loop.create_future()
        self._batch.submit(ticket)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            ticket.aborted = True
            raise

    async def abort(self) -> None:
        with self._holding_back():
            for ticket in self._in_flight:
                ticket.aborted = True
            await self._idle(None)

    async def drain(self, limit_s: float) -> None:
        with self._holding_back():
            if self._batch is not None:
                self._batch.send_back()
            await self._idle(limit_s)
            await self.abort()

    async def sleep(self, tags: tuple[str, ...] = TAGS) -> None:
        async with self._control:
            self._check_idle("sleep")
            leaving = [tag for tag in _known(tags) if tag in self._awake]
            self._awake.difference_update(leaving)
            if "weights" in leaving:
                self.version, self._whole = -1, False
            await _in_thread(lambda: self._free(leaving))

    async def wake(self, tags: tuple[str, ...] = TAGS) -> None:
        async with self._control:
            self._check_started()
            coming = [tag for tag in _known(tags) if tag not in self._awake]
            await _in_thread(lambda: self._allocate(coming))
            self._awake.update(coming)

    async def update_weights(self, manifest: Manifest, version: int, verify: bool) -> None:
        await self._update(manifest, version, lambda: self._model.update(manifest, read(manifest), verify))

    def ipc_label(self, manifest: Manifest) -> str:
        return ""

    async def update_weights_ipc(
        self, payloads: Sequence[bytes], manifest: Manifest, version: int, digest: int, verify: bool
    ) -> None:
        def take() -> None:
            (payload,) = payloads
            self._load_direct(manifest, iter(open_handles(payload)), digest, verify)

        await self._update(manifest, version, take)

    async def join(self, meeting: Meeting) -> None:
        async with self._control:
            self._group = await _in_thread(lambda: join_group(meeting, 1))

    async def leave(self) -> None:
        async with self._control:
            group, self._group = self._group, None
            if group is not None:
                await _in_thread(lambda: close_group(group, broken=True))

    async def update_weights_broadcast(self, manifest: Manifest, version: int, digest: int, verify: bool) -> None:
        if self._group is None:
            raise OperationFailed("the engine is in no group with a trainer")
        arriving = receive([bucket.nbytes for bucket in manifest.buckets], self._group, "cpu")
        await self._update(manifest, version, lambda: self._load_direct(manifest, arriving, digest, verify))

    async def _update(self, manifest: Manifest, version: int, load: Callable[[], None]) -> None:
        async with self._control:
            self._check_idle("load weights")
            if "weights" not in self._awake:
                raise OperationFailed("the engine cannot load weights while they sleep")
            if manifest.version != version:
                raise OperationFailed(f"version {version} was to be loaded, and the manifest is of {manifest}")
            self.version, self._whole = -1, False
            await _in_thread(load)
            self.version, self._whole = version, True

    def _load_direct(self, manifest: Manifest, buckets: Iterator[Tensor], digest_: int, verify: bool) -> None:
        """Load what came from the trainer. Each bucket's digest is taken after it was read."""
        read_: list[int] = []

        def named() -> Iterator[tuple[str, Tensor]]:
            for bucket, flat in zip(manifest.buckets, buckets, strict=True):
                yield from tensors(bucket, flat)
                read_.append(digest([flat]))

        self._model.update(manifest, named(), verify)
        if sum(read_) % 2**64 != digest_:
            raise OperationFailed(f"the engine was given other bytes than the trainer's of {manifest}")

    async def fingerprint(self) -> dict[str, int]:
        async with self._control:
            if "weights" not in self._awake:
                raise OperationFailed("sleeping weights have no fingerprint")
            return await _in_thread(self._model.fingerprint)

    def resident_bytes(self) -> dict[str, int]:
        model, pool = self._model, self._pool
        return {
            "weights": model.resident if model else 0,
            "kv_cache": pool.resident if pool else 0,
            "graphs": 0,
            "residue": model.residue if model else 0,
        }

    def pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    async def close(self) -> None:
        async with self._control:
            self._awake, self._whole, self.version = set(), False, -1
            await self.abort()
            batch, self._batch = self._batch, None
            if batch is not None:
                await _in_thread(batch.stop)
            self._free_all()

    # --- requests -------------------------------------------------------------------------------------

    def _refusal(self, request: GenerateRequest) -> str:
        if self._batch is None:
            return "the engine does not run"
        if asleep := [tag for tag in TAGS if tag not in self._awake]:
            return f"the engine's {', '.join(asleep)} sleep"
        if not self._whole:
            return "the engine has no weights: none were loaded since it slept, or loading them failed"
        return self._batch.refusal(request)

    def _ended(self, ticket: Ticket, result: GenerateResult) -> None:
        self._in_flight.pop(ticket).set_result(result)

    async def _idle(self, limit_s: float | None) -> None:
        """Until nothing is in flight, or `limit_s` have passed."""
        if self._in_flight:
            await asyncio.wait(self._in_flight.values(), timeout=limit_s)

    @contextmanager
    def _holding_back(self) -> Iterator[None]:
        """New requests end at once, or the engine would never be empty."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1

    def _check_started(self) -> None:
        if self._batch is None:
            raise OperationFailed("the engine does not run")

    def _check_idle(self, what: str) -> None:
        self._check_started()
        if self._in_flight:
            raise OperationFailed(f"the engine cannot {what} with {len(self._in_flight)} requests in flight")

    # --- memory; these run in a thread, one at a time --------------------------------------------------

    def _build(self) -> None:
        self._model = HFModel(self._config)
        self._pool = self._model.pool(self._config.kv_tokens)
        self._hold("residue", self._model.residue)
        with self._taking(["weights", "kv_cache"]):
            self._model.load()
            self._pool.allocate()

    def _allocate(self, tags: list[str]) -> None:
        with self._taking(tags):
            if "weights" in tags:
                self._model.allocate()
            if "kv_cache" in tags:
                self._pool.allocate()

    @contextmanager
    def _taking(self, tags: list[str]) -> Iterator[None]:
        """Announce what is about to be allocated; take everything back if any of it cannot be had."""
        try:
            for tag, part in (("weights", self._model), ("kv_cache", self._pool)):
                if tag in tags:
                    self._hold(tag, part.nbytes)
            yield
        except BaseException as error:
            self._free(tags)
            if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "alloc" in str(error).lower()):
                raise OutOfMemory(f"the host has no room for {', '.join(tags)}: {error}") from error
            raise

    def _free(self, tags: list[str]) -> None:
        for tag, part in (("weights", self._model), ("kv_cache", self._pool)):
            if tag in tags and part is not None:
                part.free()
                self._hold(tag, 0)

    def _free_all(self) -> None:
        self._free(["weights", "kv_cache"])
        if self._model is not None:
            self._hold("residue", 0)
        self._model = self._pool = None


def _known(tags: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise OperationFailed(f"an engine has no {', '.join(unknown)}; tags: {', '.join(TAGS)}")
    return tags


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` beside the event loop. Who is cancelled still waits for it: it may not go on once the lock is free."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
