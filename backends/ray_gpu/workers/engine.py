"""An engine's process: one `engines.base.Engine` behind a gate, obeying the scheduler.

1. The gate is here, not only at the gateway: a request that comes while it is closed ends as `aborted`, so no late
   message makes the engine serve when it must not.
2. Orders of an older epoch than the last one obeyed are refused; a doubled order succeeds and changes nothing.
3. Orders are carried out one after another; requests run beside them on the same event loop.
"""

import asyncio
from typing import Any

import msgspec

from backends.ray_gpu.engines.base import EngineConfig, GenerateRequest, GenerateResult
from backends.ray_gpu.places import engine_name, models
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.ways import Way
from backends.ray_gpu.workers.base import AsyncWorker
from backends.ray_gpu.workers.borrower import Borrower, Delivery
from backends.ray_gpu.workers.memory import DeviceMemory
from core import actions
from core.errors import OperationFailed, TurnstileError
from core.workload import settled

ORDERS = actions.WakeEngine | actions.SyncEngine | actions.SleepEngine | actions.OpenGate


class EngineWorker(AsyncWorker):
    """An async Ray actor."""

    def __init__(self, plan: CrewPlan, session: str, rank: int, port: int, budgets: dict[int, int], way: Way) -> None:
        super().__init__(plan, session, engine_name(rank), plan.job.spec.infer.bundle(rank))
        self._rank = rank
        self._port = port
        self._memory = DeviceMemory(plan, self.places, self.owner, self.gpus, budgets)
        self._building = asyncio.Lock()
        self._built = False
        self._borrower = Borrower(plan, rank, way)
        self._delivery: Delivery | None = None
        self._turn = asyncio.Lock()
        self._gate = False
        self._awake = False
        self._engine: Any = None
        self._requests: dict[str, asyncio.Future[GenerateResult]] = {}

    async def build(self) -> None:
        """Load the model, then sleep. Once: who asks again waits until it is done. Raises OperationFailed, OutOfMemory
        or ConfigError."""
        async with self._building:
            if not self._built:
                await self._build()
                self._built = True

    async def _build(self) -> None:
        self._engine = await asyncio.to_thread(make_engine, self.plan, self.gpus, self._port, self._memory)
        await self._engine.start()
        self.record(*self._engine.pids())
        await self._engine.sleep()

    # --- orders ----------------------------------------------------------------------------------------

    async def obey(self, order: bytes) -> str | None:
        """Carry out an action of the scheduler; None, or why it did not happen."""
        action = msgspec.msgpack.decode(order, type=ORDERS)
        try:
            await self._obey(action)
        except TurnstileError as error:
            return str(error)
        return None

    async def _obey(self, action: ORDERS) -> None:
        async with self._turn:
            self.obeys(action.epoch)
            if self._engine is None:
                raise OperationFailed(f"{self.owner} is not loaded")
            match action:
                case actions.WakeEngine():
                    if not self._awake:
                        await self._engine.wake(("weights", "graphs"))
                        self._awake = True
                case actions.SyncEngine():
                    await self._sync(action)
                case actions.OpenGate():
                    self._open(action)
                case actions.SleepEngine():
                    await self._sleep(action)

    async def _sync(self, action: actions.SyncEngine) -> None:
        """Weights first, then the KV cache: it has room only once nothing else of the load is in the way."""
        if not self._awake:
            raise OperationFailed(f"{self.owner} is asleep and cannot be synced")
        if self._engine.version != action.version:
            await self._empty(action.emptying, action.drain)
            with self._cache().reading(action.version) as manifest:
                self._delivery = await self._borrower.bring(self._engine, manifest, action.version)
        await self._engine.wake(("kv_cache",))

    async def delivery(self) -> Delivery | None:
        """How the last version came that was not told of yet."""
        delivery, self._delivery = self._delivery, None
        return delivery

    def _cache(self) -> Any:
        from backends.ray_gpu.weights.cache import WeightCache

        return WeightCache(self.places.memory, self.plan.id, self.job.spec.staleness + 2)

    async def _empty(self, emptying: actions.Emptying, drain: int) -> None:
        if emptying is actions.Emptying.KEEP:
            return
        self._gate = False
        if emptying is actions.Emptying.DRAIN:
            await self._engine.drain(drain / 1e9)
        else:
            await self._engine.abort()

    def _open(self, action: actions.OpenGate) -> None:
        if not self._awake or self._engine.version != action.version:
            held = f"version {self._engine.version}" if self._awake else "nothing: it is asleep"
            raise OperationFailed(f"{self.owner} cannot serve version {action.version}; it holds {held}")
        self._gate = True

    async def _sleep(self, action: actions.SleepEngine) -> None:
        self._gate = False
        if not self._awake:
            return
        keeps = action.emptying is actions.Emptying.KEEP  # which no request outlives
        await self._empty(actions.Emptying.ABORT if keeps else action.emptying, action.drain)
        await self._engine.sleep()
        self._awake = False

    # --- requests --------------------------------------------------------------------------------------

    async def generate(self, packed: bytes) -> bytes:
        """One request to its end: the version of the weights that served it, and a `GenerateResult`."""
        return msgspec.msgpack.encode(await self._generate(msgspec.msgpack.decode(packed, type=GenerateRequest)))

    async def _generate(self, request: GenerateRequest) -> tuple[int, GenerateResult]:
        if not self._gate:
            return -1, GenerateResult(status="aborted", reason=f"the gate of {self.owner} is closed")
        version = self._engine.version
        task = self._requests[request.id] = asyncio.ensure_future(self._engine.generate(request))
        try:
            return version, await task
        except asyncio.CancelledError:
            return version, GenerateResult(status="aborted", reason="cancelled")
        finally:
            del self._requests[request.id]

    async def cancel(self, request: str) -> None:
        """Nobody waits for this request any more."""
        task = self._requests.get(request)
        if task is not None:
            task.cancel()

    async def fingerprint(self) -> dict[str, int]:
        """Checksums of the parameters as loaded, by name."""
        return await self._engine.fingerprint()


def make_engine(plan: CrewPlan, gpus: tuple[int, ...], port: int, memory: DeviceMemory) -> Any:
    """The engine that suits the device. Heavy imports happen here."""
    from backends.ray_gpu.models.resolve import resolve

    workload = settled(plan.job.workload, plan.device)
    config = EngineConfig(
        model=resolve(workload.model, models()).path, kv_tokens=workload.kv_tokens,
        max_running=plan.job.costs.engine_slots, tp=plan.job.spec.infer.tp, device=plan.device, dtype=workload.dtype,
        seed=plan.seed, port=port, gpus=gpus,
    )  # fmt: skip
    if plan.device == "cpu":
        from backends.ray_gpu.engines.hf import HFEngine

        return HFEngine(config, memory.hold)
    from backends.ray_gpu.engines.sglang import SglangEngine

    return SglangEngine(config, memory.hold)
