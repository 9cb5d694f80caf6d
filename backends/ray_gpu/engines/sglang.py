"""The SGLang engine: one offline SGLang engine in one process of its own, behind the interface of `base`.

Rules of this room, beside those of `base`:

1. SGLang ends the process that holds it whenever one of its children fails. So each engine has an actor to itself, and
   the death of that actor is how a failure while serving shows. A failure to start is raised instead.
2. SGLang is built in a thread that lives as long as the engine, because its children ask the kernel to be killed when
   the thread that started them ends. Everything else happens on the caller's event loop.
3. SGLang kills itself when memory is released while it is busy, or when a tag is released or taken back twice. Which
   tags sleep is known here, and idleness is confirmed by its scheduler before every release.
4. The size of the KV pool is `kv_tokens` exactly. SGLang's memory fraction is only the ceiling it is checked against.
5. Nothing listens: children meet through files and Unix sockets in a directory of the engine's own.

The process needs `environment()` before it imports anything. Only methods import SGLang.
"""

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from backends.ray_gpu.engines import sglang_child as child
from backends.ray_gpu.engines import sglang_process as process
from backends.ray_gpu.engines.base import TAGS, EngineConfig, GenerateRequest, GenerateResult, Hold
from backends.ray_gpu.engines.sglang_setup import check_model, merged_flags, planned_bytes
from backends.ray_gpu.weights.manifest import Manifest
from backends.ray_gpu.weights.transports import Meeting
from core.errors import OperationFailed, WorldError
from core.units import gib

SGLANG_TAGS = {"weights": "weights", "kv_cache": "kv_cache", "graphs": "cuda_graph"}
# Graphs first: they are small, and the weights may then be loaded while the pool is still asleep.
WAKE_ORDER = ("graphs", "weights", "kv_cache")
IDLE_LIMIT_S = 10.0
"""Longest that SGLang's scheduler may take to end what was aborted; it takes milliseconds."""
SEED_BITS = (1 << 63) - 1


class SglangEngine:
    """See `base.Engine`. `flags` overrule what `sglang_setup.launch_flags` would pass to SGLang."""

    def __init__(
        self, config: EngineConfig, hold: Hold = lambda tag, nbytes: None, flags: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.version = -1
        self.load_seconds = 0.0
        """How long the slowest rank took for the last load."""
        self._hold = hold
        self._flags = dict(flags or {})
        self._engine: Any = None
        self._over = threading.Event()
        self._keeper: threading.Thread | None = None
        self._before: set[Any] = set()
        """Children of this process that are not SGLang's."""
        self._contexts: list[Any] = []
        """ZeroMQ's in this process that are not SGLang's."""
        self._scratch: Path | None = None
        self._sizes = dict.fromkeys(TAGS, 0)
        self._asleep: set[str] = set()
        self._whole = False
        self._flights: dict[str, asyncio.Task[GenerateResult]] = {}
        self._cut: set[str] = set()
        self._shut = 0
        self._requests = 0
        self._manifest: Manifest | None = None
        self._control = asyncio.Lock()

    @property
    def releases(self) -> bool:
        """Whether `sleep` gives memory back: SGLang can on CUDA only. Elsewhere it is a rehearsal of the same steps."""
        return self.config.device == "cuda"

    # --- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        architectures = check_model(self.config).get("architectures") or ()
        planned = planned_bytes(self.config)
        for tag, nbytes in planned.items():
            self._hold(tag, nbytes)
        self._scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
        flags = merged_flags(self.config, self._flags) | {"custom_weight_loader": [child.DOOR]}
        built: Future[Any] = Future()
        self._before = set(multiprocessing.active_children())
        self._contexts = process.message_contexts()
        self._keeper = threading.Thread(
            target=self._live, args=(flags, architectures, built), name="sglang", daemon=True
        )
        self._keeper.start()
        try:
            self._engine = await asyncio.wrap_future(built)
            process.listen(self._engine)
            self._check_pool()
            self._sizes = planned | await self._measure()
            process.forget_load_snapshots(self._scratch)
        except BaseException:
            await self.close()
            raise
        for tag, nbytes in self._sizes.items():
            self._hold(tag, nbytes)
        self._whole = True

    def _live(self, flags: dict[str, Any], architectures: Sequence[str], built: "Future[Any]") -> None:
        """Body of the thread that is SGLang's parent (rule 2)."""
        assert self._scratch is not None
        built.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so what is built is always ended
        try:
            with process.failing_softly():
                engine = process.build(flags, architectures, self._scratch)
        except BaseException as error:  # handed to whoever waits for the start
            process.kill_children(self._before)
            built.set_exception(process.start_error(error))
            return
        built.set_result(engine)
        self._over.wait()
        process.end(engine)

    def _check_pool(self) -> None:
        tokens = self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        if tokens < self.config.kv_tokens:
            raise OperationFailed(
                f"when the engine started, the GPU had room for {tokens} tokens, not for {self.config.kv_tokens}"
            )

    async def _measure(self) -> dict[str, int]:
        """Bytes that SGLang says it took for its pool and its graphs: it tells GiB on one GPU."""
        state = (await self._engine.tokenizer_manager.get_internal_state())[0]["memory_usage"]
        sizes = {"kv_cache": state["kvcache"], "graphs": sum((state["graph"] or {}).values())}
        return {tag: self.config.tp * gib(size) for tag, size in sizes.items()}

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        self._whole, self.version = False, -1
        self._over.set()
        if self._keeper is not None:
            if engine is None:
                process.kill_children(self._before)  # a start that was given up: it fails now instead of going on
            await asyncio.to_thread(self._keeper.join)
        if engine is not None:
            await process.silence(engine)
            for flight in list(self._flights.values()):
                flight.cancel()
        self._sizes = dict.fromkeys(TAGS, 0)
        for tag in TAGS:
            self._hold(tag, 0)
        if self._scratch is not None:
            process.drop_contexts(self._contexts)
            process.forget_load_snapshots(self._scratch)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def pids(self) -> tuple[int, ...]:
        """This process and SGLang's: a scheduler for each GPU, in rank order, then the detokenizer."""
        children = self._engine.get_all_child_pids() if self._engine is not None else ()
        return (os.getpid(), *children)

    def resident_bytes(self) -> dict[str, int]:
        """On all GPUs of the bundle together. What a sleeping engine keeps (contexts, communicators) only the device
        can tell, so `residue` is 0 here. Where SGLang cannot release (`releases`), a sleeping tag still counts."""
        gone = self._asleep if self.releases else set()
        return {tag: 0 if tag in gone else nbytes for tag, nbytes in self._sizes.items()} | {"residue": 0}

    # --- generation -----------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if reason := self._refusal():
            return GenerateResult(status="failed", reason=reason)
        if self._shut:
            return GenerateResult(status="aborted", reason="the engine is being emptied")
        self._requests += 1
        key = f"{self._requests}-{request.id}"
        flight = asyncio.get_running_loop().create_task(self._fly(key, request))
        self._flights[key] = flight
        flight.add_done_callback(lambda _: self._flights.pop(key, None))
        try:
            return await asyncio.shield(flight)
        except asyncio.CancelledError:
            self._abort(key)
            raise

    def _refusal(self) -> str:
        """Why nothing can be served now; empty if it can."""
        if self._engine is None:
            return "the engine is not running"
        if self._asleep:
            return f"asleep: {', '.join(tag for tag in TAGS if tag in self._asleep)}"
        return "" if self._whole else "the weights are not whole: they need an update"

    async def _fly(self, key: str, request: GenerateRequest) -> GenerateResult:
        """One request through SGLang. Only `close` cancels it: an abort is a message, and its answer is awaited."""
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        if key in self._cut:
            return GenerateResult(status="aborted", reason="aborted before it began")
        order = _orders().GenerateReqInput(
            rid=key,
            input_ids=list(request.input_ids),
            sampling_params=sampling(request),
            return_logprob=True,
            logprob_start_len=-1,
        )
        try:
            # Closed at once: until then the request counts as a reader of the weights, and an update would wait for it.
            async with contextlib.aclosing(self._engine.tokenizer_manager.generate_request(order, None)) as answers:
                out = await anext(answers)
        except RequestAbortedError:
            return GenerateResult(status="aborted", reason="aborted before it began")
        except Exception as error:  # SGLang refuses requests with errors of several unrelated kinds
            return GenerateResult(status="failed", reason=f"{type(error).__name__}: {error}")
        finally:
            self._cut.discard(key)
        return result(out)

    def _abort(self, key: str) -> None:
        if key in self._flights and self._engine is not None:
            self._cut.add(key)
            self._engine.tokenizer_manager.abort_request(key)

    async def abort(self) -> None:
        async with self._emptying():
            await self._abort_all()

    async def drain(self, limit_s: float) -> None:
        async with self._emptying():
            if self._flights:
                await asyncio.wait(self._flights.values(), timeout=limit_s)
            await self._abort_all()

    @contextlib.asynccontextmanager
    async def _emptying(self) -> AsyncIterator[None]:
        self._shut += 1
        try:
            yield
        finally:
            self._shut -= 1

    async def _abort_all(self) -> None:
        """Partial results are in their callers' hands when this returns, and the scheduler has said that it is idle."""
        if self._engine is None:
            return
        if self._flights:
            self._cut.update(self._flights)
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            await asyncio.wait(self._flights.values())
        await self._confirm_idle()

    async def _confirm_idle(self) -> None:
        answer = await self._engine.tokenizer_manager.flush_cache(timeout_s=IDLE_LIMIT_S)
        if not answer.success:
            raise OperationFailed(f"SGLang's scheduler was not idle within {IDLE_LIMIT_S} s: {answer.message}")

    # --- sleep and wake -------------------------------------------------------------------------------------

    async def sleep(self, tags: tuple[str, ...] = TAGS) -> None:
        async with self._control:
            self._demand_running("sleep")
            self._demand_idle("sleep")
            going = [tag for tag in TAGS if tag in tags and tag not in self._asleep]
            if not going:
                return
            async with self._emptying():  # whatever is asked for from here on ends at once
                await self._confirm_idle()
                if "weights" in going:
                    self.version, self._whole = -1, False
                self._asleep.update(going)
                await self._tell(
                    "release", _orders().ReleaseMemoryOccupationReqInput(tags=[SGLANG_TAGS[tag] for tag in going])
                )
            for tag in going:
                self._hold(tag, self.resident_bytes()[tag])

    async def wake(self, tags: tuple[str, ...] = TAGS) -> None:
        async with self._control:
            self._demand_running("wake")
            coming = [tag for tag in WAKE_ORDER if tag in tags and tag in self._asleep]
            if not coming:
                return
            self._hold_all(coming)
            await self._tell(
                "resume", _orders().ResumeMemoryOccupationReqInput(tags=[SGLANG_TAGS[tag] for tag in coming])
            )
            self._asleep.difference_update(coming)

    def _hold_all(self, tags: Sequence[str]) -> None:
        """All or nothing."""
        for index, tag in enumerate(tags):
            try:
                self._hold(tag, self._sizes[tag])
            except WorldError:
                for held in tags[:index]:
                    self._hold(held, 0)
                raise

    async def _tell(self, verb: str, order: Any) -> None:
        await getattr(self._engine.tokenizer_manager, f"{verb}_memory_occupation")(order, None)

    def _demand_running(self, verb: str) -> None:
        if self._engine is None:
            raise OperationFailed(f"cannot {verb}: the engine is not running")

    def _demand_idle(self, verb: str) -> None:
        if self._flights:
            raise OperationFailed(
                f"cannot {verb}: {len(self._flights)} requests are in flight; abort or drain them first"
            )

    # --- weights --------------------------------------------------------------------------------------------

    async def update_weights(self, manifest: Manifest, version: int, verify: bool) -> None:
        async with self._updating():
            # Checked while it is loaded: what turns out damaged is never served, because `_updating` stays unfinished.
            _, replies = await asyncio.gather(asyncio.to_thread(_check, manifest), self._errand("load", manifest))
            self.load_seconds = max(reply.seconds for reply in replies)
            self._manifest = manifest
            if verify:
                await self._compare(manifest)
            self.version = version

    def ipc_label(self, manifest: Manifest) -> str:
        return child.send(self._make_errand("take", manifest))

    async def update_weights_ipc(
        self, payloads: Sequence[bytes], manifest: Manifest, version: int, digest: int, verify: bool
    ) -> None:
        if len(payloads) != self.config.tp:
            raise OperationFailed(f"{len(payloads)} payloads for {self.config.tp} ranks")
        async with self._updating():
            await self._deliver("take", payloads)
            replies = child.replies(self._make_errand("take", manifest), self.config.tp)
            await self._settle(replies, manifest, version, digest, verify)

    async def join(self, meeting: Meeting) -> None:
        async with self._control:
            self._demand_running("join")
            await self._errand("join", meeting=meeting)

    async def leave(self) -> None:
        async with self._control:
            self._demand_running("leave")
            await self._errand("leave")

    async def update_weights_broadcast(self, manifest: Manifest, version: int, digest: int, verify: bool) -> None:
        async with self._updating():
            await self._settle(await self._errand("receive", manifest), manifest, version, digest, verify)

    async def fingerprint(self) -> dict[str, int]:
        async with self._control:
            self._demand_running("fingerprint")
            if "weights" in self._asleep or self._manifest is None:
                raise OperationFailed("there is no fingerprint: the weights are asleep, or none were loaded yet")
            return (await self._errand("fingerprint", self._manifest))[0].checksums

    @contextlib.asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        async with self._control:
            self._demand_running("update weights")
            self._demand_idle("update weights")
            if "weights" in self._asleep:
                raise OperationFailed("cannot update weights: they are asleep")
            self.version, self._whole = -1, False
            yield
            self._whole = True

    async def _settle(
        self, replies: Sequence[child.Reply], manifest: Manifest, version: int, digest: int, verify: bool
    ) -> None:
        """What came directly is there; was it what the trainer sent?"""
        self.load_seconds = max(reply.seconds for reply in replies)
        for reply in replies:
            if reply.digest != digest:
                raise OperationFailed(f"rank {reply.rank} was given other bytes than the trainer's of {manifest}")
        self._manifest = manifest
        if verify:
            await self._compare(manifest)
        self.version = version

    async def _compare(self, manifest: Manifest) -> None:
        """Raise OperationFailed naming the first tensor that is not what was published."""
        from backends.ray_gpu.weights import reader

        replies, published = await asyncio.gather(
            self._errand("fingerprint", manifest), asyncio.to_thread(reader.fingerprint, manifest)
        )
        loaded = replies[0].checksums
        for name, checksum in published.items():
            if name in loaded and loaded[name] != checksum:
                raise OperationFailed(f"{name} differs from {manifest} after it was loaded")

    def _make_errand(self, what: Any, manifest: Manifest | None = None, meeting: Meeting | None = None) -> child.Errand:
        return child.Errand(what=what, manifest=manifest, meeting=meeting, replies=str(self._scratch))

    async def _errand(
        self, what: Any, manifest: Manifest | None = None, meeting: Meeting | None = None
    ) -> list[child.Reply]:
        """Send every rank on an errand and collect the answers."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        errand = self._make_errand(what, manifest, meeting)
        named = [(child.send(errand), torch.zeros(1))]
        await self._deliver(what, [MultiprocessingSerializer.serialize(named) for _ in range(self.config.tp)])
        return child.replies(errand, self.config.tp)

    async def _deliver(self, what: str, payloads: Sequence[bytes]) -> None:
        """Hand each rank its payload, through SGLang's door for custom weight loaders."""
        order = _orders().UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=list(payloads),
            load_format=child.DOOR,
            flush_cache=what in ("load", "take", "receive"),
        )
        self._succeeded(await self._engine.tokenizer_manager.update_weights_from_tensor(order, None))

    @staticmethod
    def _succeeded(answer: tuple[bool, str]) -> None:
        success, message = answer
        if not success:
            raise OperationFailed(f"SGLang refused: {message}")


def _orders() -> Any:
    """SGLang's messages."""
    from sglang.srt.managers import io_struct

    return io_struct


# --- plain functions ------------------------------------------------------------------------------------------------


def sampling(request: GenerateRequest) -> dict[str, Any]:
    """SGLang's sampling parameters. A request ends at its own stop tokens only (`child.stop_where_told`)."""
    return {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": list(request.stop_ids),
        "sampling_seed": request.seed & SEED_BITS,
    }


def result(out: Mapping[str, Any]) -> GenerateResult:
    """SGLang's answer to one request, as ours."""
    meta = out["meta_info"]
    logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
    tokens = tuple(int(token) for token in out.get("output_ids") or ())
    finish = meta["finish_reason"] or {}
    aborted = finish.get("type") == "abort"
    # What an abort caught between two messages has a token without its log-probability, or the reverse.
    pairs = min(len(tokens), len(logprobs))
    if not aborted and len(tokens) != len(logprobs):
        return GenerateResult(
            status="failed", reason=f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities"
        )
    return GenerateResult(
        status="aborted" if aborted else "completed",
        token_ids=tokens[:pairs],
        logprobs=logprobs[:pairs],
        reason=str(finish.get("message", "")) if aborted else "",
    )


def _check(manifest: Manifest) -> None:
    from backends.ray_gpu.weights import reader

    for bucket in manifest.buckets:
        reader.read_bucket(bucket, verify=True)
