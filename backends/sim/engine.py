"""An inference engine: slots and a queue, continuous batching, a gate, weights of one version, epochs.

Rules of this room:

1. Up to `slots` requests decode at once, each at full speed: below that number, continuous batching costs no one
   anything. The rest wait in a queue.
2. A request costs one calendar entry, its end. Only what changes the speed of an engine (a fault, an update in
   flight) touches the entries of those that run.
3. Whatever is asked of a closed gate is refused: aborted, with nothing generated and nothing lost. The gate opens by
   `OpenGate` alone, for the version really loaded, and closes before the engine is emptied, sleeps, syncs or dies.
4. Sleeping throws weights, KV cache and graphs away: after a wake the engine holds no version until it is synced.
5. Every request ends: completed, aborted (with what it generated) or failed (its engine died, and with it what this
   attempt generated).

Tokens: a segment's tokens are its decoding time over `NS_PER_TOKEN`, so a resumed attempt has that much less to do.
"""

import asyncio
from collections.abc import Generator
from typing import Any

import simpy

from backends.sim.link import Steps, WeightCache, transfer
from backends.sim.memory import Kind, Parts
from backends.sim.worker import Worker
from backends.sim.world import World
from core import actions
from core.actions import Emptying
from core.backend import Generation
from core.config import Job
from core.events import EngineBusy, EngineDied, EngineIdle

NS_PER_TOKEN = 20_000_000
"""Decoding time of one token of one request in a batch: 50 a second. Measured runs lie around it: 8,192 tokens in
131 s (7B, 16 ms a token) and in 307 s (27B, 37 ms)."""

GRAPHS_SHARE = 32
"""One part in this many of an awake engine is graphs; the scenario declares the sum only."""

PHASES = ("wake", "restart", "sync", "sleep", "gate", "warmup")
AWAKE = (Kind.WEIGHTS, Kind.KV_CACHE, Kind.GRAPHS)

Outcome = str | None
Segments = tuple[tuple[int, int], ...]


class Request:
    """One attempt at one trajectory, inside an engine."""

    __slots__ = ("done", "engine", "finish", "future", "left", "segments", "since")

    def __init__(self, engine: "Engine", prefix: Segments, left: int, future: "asyncio.Future[Generation]") -> None:
        self.engine = engine
        self.segments = prefix
        """Finished ones: the prefix, and those of versions replaced in flight."""
        self.left = left
        """ns of decoding still to do, as of `since`."""
        self.done = 0
        """ns of decoding done for the present segment, as of `since`."""
        self.since = 0
        self.finish: Finish | None = None
        """Its end on the calendar; None while it is not decoding."""
        self.future = future

    def end(self, generation: Generation) -> None:
        if not self.future.done():
            self.future.set_result(generation)


class Finish:
    """The end of a request: a calendar entry. The request can drop it and make another, at another time."""

    __slots__ = ("callbacks", "daemon", "request")
    _ok = True
    label = "trajectory ends"

    def __init__(self, request: Request) -> None:
        self.request = request
        self.callbacks: Any = _FINISH

    def ring(self) -> None:
        self.request.engine.finished(self.request)


_FINISH = (Finish.ring,)


class Kernels:
    """The compiled kernels of one pipeline's engines, in a cache that their processes share."""

    def __init__(self) -> None:
        self.there_from: int | None = None
        """When the first process has compiled them; None: nobody has begun."""


class Engine(Worker):
    def __init__(self, world: World, job: Job, dp_rank: int, cache: WeightCache, kernels: Kernels) -> None:
        infer = job.spec.infer
        super().__init__(world, f"{job.spec.id}/{dp_rank}", infer.bundle(dp_rank), job, PHASES)
        self.pipeline = job.spec.id
        self.dp_rank = dp_rank
        self.cache = cache
        self.links = world.links_of(self.gpus)
        self.slots = job.costs.engine_slots
        self.parts = _parts(job, infer.tp)
        self.residue = job.spec.memory.residue
        self.awake = False
        self.gate = False
        self.version = -1
        self.frozen = False
        """Nothing decodes: it hangs, or takes new weights in flight."""
        self.running: dict[Request, None] = {}
        self.waiting: dict[Request, None] = {}
        self._decoding = False
        self._drained: simpy.Event | None = None
        self._slow_gate = job.costs.gate != 0
        self._kernels = kernels
        self._needs_no_kernels = self._warm = job.costs.warmup == 0
        self._warm_at = 0
        """From when on its process has all kernels; nothing decodes before."""
        self._busy = EngineBusy(pipeline=self.pipeline, dp_rank=dp_rank)
        self._idle = EngineIdle(pipeline=self.pipeline, dp_rank=dp_rank)

    # --- requests ------------------------------------------------------------------------------------------

    def why_closed(self) -> str:
        """Why its gate is shut."""
        return f"engine {self.owner} is closed" if self.alive else f"engine {self.owner} is dead: {self.why_dead}"

    def submit(self, prefix: Segments, length: int, future: "asyncio.Future[Generation]") -> Request:
        """Let a trajectory of `length` ns, of which `prefix` is there already, decode as soon as a slot is free."""
        left = length
        if prefix:
            left = max(1, length - sum(tokens for _, tokens in prefix) * NS_PER_TOKEN)
        request = Request(self, prefix, left, future)
        if len(self.running) < self.slots:
            self._begin(request)
        else:
            self.waiting[request] = None
        return request

    def withdraw(self, request: Request) -> None:
        """The client does not want it any more."""
        if request in self.running:
            self._stop_decoding(request)
            self._leave(request)
        else:
            self.waiting.pop(request, None)

    def finished(self, request: Request) -> None:
        """It has all its tokens."""
        request.finish = None
        decoded = request.done + request.left
        request.end(
            Generation(status="completed", segments=_with(request.segments, self.version, -(-decoded // NS_PER_TOKEN)))
        )
        self._leave(request)

    def _begin(self, request: Request) -> None:
        self.running[request] = None
        if not self.frozen:
            self._decode(request)
            if not self._decoding:
                self._show_decoding()

    def _leave(self, request: Request) -> None:
        """Its slot is free; the next one in the queue gets it."""
        del self.running[request]
        if self.waiting:
            heir = next(iter(self.waiting))
            del self.waiting[heir]
            self._begin(heir)
        elif not self.running:
            self._show_decoding()
        if self._drained is not None and not self.running:
            self._ring_drained()

    def _decode(self, request: Request) -> None:
        env = self.env
        since: int = env._now  # type: ignore[assignment]
        if not self._warm:
            self._warm_up(since)
        if since < self._warm_at:
            since = self._warm_at
        request.since = since
        request.finish = Finish(request)
        left = request.left
        env.push(request.finish, since + (left if self.slowness == 1.0 else int(left * self.slowness)))

    def _warm_up(self, now: int) -> None:
        """Its process decodes for the first time: it compiles what it does not find compiled."""
        self._warm, found = True, self._kernels.there_from
        if found is None or now < found:
            self._warm_at = now + self.cost("warmup")
            self._kernels.there_from = self._warm_at if found is None else min(found, self._warm_at)

    def _stop_decoding(self, request: Request) -> None:
        """Take its end off the calendar and note how far it came."""
        if request.finish is None:
            return
        self.env.cancel(request.finish)
        request.finish = None
        elapsed: int = self.env._now - request.since  # type: ignore[assignment]
        if self.slowness != 1.0:
            elapsed = int(elapsed / self.slowness)
        elapsed = min(max(0, elapsed), request.left)  # it may not have begun; a fraction may have been rounded up
        request.left -= elapsed
        request.done += elapsed

    def _show_decoding(self) -> None:
        """Report the change, if it is one, between decoding and not."""
        decoding = bool(self.running) and not self.frozen
        if decoding is not self._decoding:
            self._decoding = decoding
            self.world.tell(self._busy if decoding else self._idle)

    def _abort(self, requests: dict[Request, None]) -> None:
        for request in tuple(requests):
            self._stop_decoding(request)
            del requests[request]
            segments = _with(request.segments, self.version, request.done // NS_PER_TOKEN)
            request.end(Generation(status="aborted", segments=segments, reason="its engine was emptied"))
        self._show_decoding()

    def _lose_all(self, reason: str) -> None:
        """The process is gone, and with it all that this attempt generated."""
        lost = (*self.running, *self.waiting)
        self.running.clear()
        self.waiting.clear()
        for request in lost:
            self._stop_decoding(request)
            request.end(Generation(status="failed", reason=reason))
        self._show_decoding()

    # --- speed ---------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        for request in self.running:
            self._stop_decoding(request)
        self.frozen = True
        self._show_decoding()

    def thaw(self) -> None:
        self.frozen = False
        for request in self.running:
            if request.finish is None:
                self._decode(request)
        self._show_decoding()

    def slow_down(self, factor: float) -> None:
        """From now on everything takes `factor` times as long (1.0: as declared)."""
        for request in self.running:
            self._stop_decoding(request)
        self.slowness = factor
        if not self.frozen:
            self.thaw()

    # --- orders --------------------------------------------------------------------------------------------

    def obey(self, action: actions.EngineAction) -> simpy.Process | Outcome:
        """Carry out an order: an operation to wait for, or the outcome at once."""
        if isinstance(action, actions.KillEngine):
            return self._kill(action)
        if isinstance(action, actions.OpenGate) and not (self.occupied or self._slow_gate):
            return self.stale(action.epoch) or self._open_gate(action)
        return self.start(lambda: self._carry_out(action))

    def _carry_out(self, action: actions.EngineAction) -> Generator[simpy.Event, Any, Outcome]:
        refused = self.stale(action.epoch)
        if refused:
            return refused
        if isinstance(action, actions.WakeEngine):
            return (yield from self._wake(action))
        if not self.alive:
            return f"engine {self.owner} is dead: {self.why_dead}"
        if isinstance(action, actions.SyncEngine):
            return (yield from self._sync(action))
        if isinstance(action, actions.SleepEngine):
            return (yield from self._sleep(action))
        assert isinstance(action, actions.OpenGate)
        yield from self.work(self.cost("gate"))
        return self._open_gate(action)

    def _kill(self, action: actions.KillEngine) -> Outcome:
        refused = self.stale(action.epoch)
        if refused is None and (self.alive or self.occupied):
            self.die(f"killed: {action.reason}")
        return refused

    def _wake(self, action: actions.WakeEngine) -> Generator[simpy.Event, Any, Outcome]:
        if action.gpus != self.gpus:
            return f"engine {self.owner} runs on GPUs {list(self.gpus)}, not on {list(action.gpus)}"
        if self.awake:
            return None
        cold = not self.alive
        if cold and not action.cold:
            return f"engine {self.owner} is dead ({self.why_dead}): only a cold start helps"
        failed = self.take(((Kind.RESIDUE, self.residue), *self.parts) if cold else self.parts)
        if failed:
            return failed
        self.alive = True
        yield from self.work(self.cost("restart" if cold else "wake"))
        self.awake = True
        return None

    def _open_gate(self, action: actions.OpenGate) -> Outcome:
        if not self.awake or self.version != action.version:
            holds = f"holds version {self.version}" if self.awake else "is not awake"
            return f"engine {self.owner} {holds} and cannot serve version {action.version}"
        self.gate = True
        return None

    def _sync(self, action: actions.SyncEngine) -> Generator[simpy.Event, Any, Outcome]:
        if not self.awake:
            return f"engine {self.owner} is asleep"
        if self.version == action.version:
            return None
        refused = self.cache.start_reading(action.version)
        if refused:
            return refused
        in_flight = action.emptying is Emptying.KEEP
        try:
            if in_flight:
                self.freeze()
            else:
                yield from self._close(action.emptying, action.drain)
            return (yield from self._load(action.version))
        finally:
            self.cache.stop_reading(action.version)
            if in_flight and self.alive and not self.hung:
                self.thaw()

    def _load(self, version: int) -> Generator[simpy.Event, Any, Outcome]:
        """Copy weights from the cache through a staging buffer."""
        failed = self.take(((Kind.BUFFER, self.world.transfer_buffer),), quiet=True)
        if failed:
            return failed
        try:
            size = self.cache.size // len(self.links)
            yield from transfer(self.links, size, self.cost("sync"), self.work)
        finally:
            self.world.memory.drop(self.owner, self.devices, Kind.BUFFER, quiet=True)
        if self.world.armed.take("fail_sync", self.pipeline, self.dp_rank):
            self._close_at_once()
            self.version = -1
            return f"the sync of engine {self.owner} to version {version} failed; it holds no whole version now"
        for request in self.running:
            request.segments = _with(request.segments, self.version, request.done // NS_PER_TOKEN)
            request.done %= NS_PER_TOKEN
        self.version = version
        return None

    def _sleep(self, action: actions.SleepEngine) -> Generator[simpy.Event, Any, Outcome]:
        if not self.awake:
            return None
        yield from self._close(action.emptying, action.drain)
        yield from self.work(self.cost("sleep"))
        self.awake = False
        self.version = -1
        armed = self.world.armed
        leak = armed.take("leak_residue", self.pipeline, self.dp_rank)
        lie = armed.take("false_release", self.pipeline, self.dp_rank)
        self.release(AWAKE, leak.bytes if leak else 0, lie.duration if lie else None)
        return None

    # --- emptying ------------------------------------------------------------------------------------------

    def _close(self, how: Emptying, limit: int) -> Steps:
        """Close the gate, then empty the engine. Requests that have not begun are sent back at once."""
        self.gate = False
        self._abort(self.waiting)
        if self.running and limit > 0 and how is Emptying.DRAIN:
            yield from self._drain(limit)
        self._abort(self.running)

    def _close_at_once(self) -> None:
        self.gate = False
        self._abort(self.waiting)
        self._abort(self.running)

    def _drain(self, limit: int) -> Steps:
        """Wait until all running requests are completed, or `limit` ns passed."""
        self._drained = simpy.Event(self.env)
        alarm = self.env.timeout(limit)
        alarm.callbacks.append(lambda _: self._ring_drained())
        try:
            yield self._drained
        finally:
            self._drained = None
            self.env.cancel(alarm)

    def _ring_drained(self) -> None:
        if self._drained is not None and not self._drained.triggered:
            self._drained.succeed()

    # --- ends ----------------------------------------------------------------------------------------------

    def hang(self) -> None:
        if self.alive:
            self.freeze()
        super().hang()

    def die(self, reason: str) -> None:
        self.gate = self.awake = self.frozen = False
        self.version = -1
        self._warm, self._warm_at = self._needs_no_kernels, 0
        self._lose_all(f"engine {self.owner} died: {reason}")
        super().die(reason)

    def fall(self, reason: str) -> None:
        if self.alive:
            self.die(reason)
            self.world.tell(EngineDied(pipeline=self.pipeline, dp_rank=self.dp_rank, reason=reason))


def _parts(job: Job, tp: int) -> Parts:
    """An awake engine on one GPU, beyond its residue: its share of the weights, some graphs, and KV cache."""
    memory = job.spec.memory
    total = max(0, memory.engine - memory.residue)
    graphs = total // GRAPHS_SHARE
    weights = min(memory.host_cache // tp, total - graphs)
    return (Kind.WEIGHTS, weights), (Kind.KV_CACHE, total - graphs - weights), (Kind.GRAPHS, graphs)


def _with(segments: Segments, version: int, tokens: int) -> Segments:
    """Append tokens of a version; one segment a stretch of one version."""
    if not tokens:
        return segments
    if segments and segments[-1][0] == version:
        return (*segments[:-1], (version, segments[-1][1] + tokens))
    return (*segments, (version, tokens))
