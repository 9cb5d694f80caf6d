"""The control plane: the core's service in one named Ray actor that every driver of a cluster shares.

Rules of this room:

1. It decides nothing: messages go into `core.service`, which runs on the fleet of workers; what it logs goes into the
   journal first and then to every driver.
2. A driver is alive while it fetches. One that is silent for longer than its limit is dead: its pipelines have lost
   their client, and the scheduler takes back what they hold.
3. If this process dies, Ray starts it again with the same arguments. It rebuilds itself from the journal (the last
   snapshot and what came after it), takes its workers over by name, begins again what had no outcome, and tells each
   driver to start its fetches anew.
4. It is over when the last driver has left.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from backends.ray_gpu import wire
from backends.ray_gpu.clock import RealClock
from backends.ray_gpu.fleet import Fleet
from backends.ray_gpu.journal import Journal
from backends.ray_gpu.outbox import Outbox
from backends.ray_gpu.places import Places
from backends.ray_gpu.plan import CrewPlan
from core import events
from core.config import Scenario
from core.errors import RequestError, TurnstileError
from core.model import Cluster, DemandPolicy, Record
from core.service import Command, Service
from core.trace import Entry, header_of

FETCH_WAIT_S = 2.0
"""How long a fetch waits for something to be there."""
LOOK_S = 1.0
"""Pause between two looks at who is silent, and at the length of the journal."""


class Run(Record, frozen=True, kw_only=True):
    """A driver that has joined, as it is kept on disk."""

    run: str
    crews: tuple[CrewPlan, ...]


class _Link:
    """A driver, as long as it lives."""

    def __init__(self, run: Run, now: float) -> None:
        self.run = run
        self.outbox = Outbox()
        self.heard = now
        """When it last said anything (seconds of the loop's clock)."""
        self.said = 0
        """Frames it said since it listens to this incarnation."""
        self.synced = False
        """It has been told everything up to now, by this incarnation of the control plane."""


class _Client:
    """A pipeline's end of the line: what the service tells it goes into its driver's outbox."""

    def __init__(self, link: _Link, pipeline: str) -> None:
        self._link = link
        self._pipeline = pipeline
        self.gates = self
        self.life = 0  # nobody has had its name before (`ControlPlane._names`)

    def replied(self, seq: int, error: RequestError | None) -> None:
        self._link.outbox.frame(wire.Replied(pipeline=self._pipeline, seq=seq, error=wire.pack_error(error)))

    def command(self, action: Command) -> None:
        self._link.outbox.frame(wire.Commanded(action=action))

    def open_gate(self, dp_rank: int, version: int, epoch: int) -> None:
        self._link.outbox.frame(wire.GateOpened(pipeline=self._pipeline, dp_rank=dp_rank, version=version, epoch=epoch))

    def close_gate(self, dp_rank: int) -> None:
        self._link.outbox.frame(wire.GateClosed(pipeline=self._pipeline, dp_rank=dp_rank))

    def failed(self, reason: str) -> None:
        raise AssertionError("a client in another process is failed by a command")


class ControlPlane:
    """The actor. Every method is called by drivers; `listen` is called all the time by each of them."""

    def __init__(
        self, session: str, cluster: Cluster, demand: DemandPolicy, options: wire.ClusterOptions, epoch_ns: int
    ) -> None:
        self._places = Places(session)
        self._places.disk.mkdir(parents=True, exist_ok=True)
        self._cluster, self._demand, self._options = cluster, demand, options
        self._incarnation = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._epoch_ns = epoch_ns
        self._links: dict[str, _Link] = {}
        self._opening: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closing = False
        self._broken: BaseException | None = None

    # --- life ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Make ready, once, whoever asks first."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        await asyncio.shield(self._opening)

    async def _start(self) -> None:
        header = header_of(Scenario(name="cluster", cluster=self._cluster, jobs=(), demand=self._demand), "ray_gpu")
        self.clock = RealClock(self._epoch_ns)
        self._journal = Journal(self._places.journal, header)
        self._fleet = self._make_fleet()
        self._service = Service(self._fleet, self._cluster, self._demand, [self._entry])
        await self._fleet.open(self._happened)
        opened = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(opened))
        await opened.wait()
        self._watch = asyncio.create_task(self._look())

    def _make_fleet(self) -> Fleet:
        return Fleet(self._places, self._cluster, self._options, self.clock)

    async def _serve(self, opened: asyncio.Event) -> None:
        """Keep the service's task group open. A broken invariant ends it, and everybody is told."""
        try:
            async with self._service:
                self._take_over()
                opened.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise
        except BaseException as problem:
            self._broken = problem
        finally:
            opened.set()

    def _take_over(self) -> None:
        """Go on where an earlier process stopped, if there was one."""
        with suppress(FileNotFoundError):
            for run in msgspec.msgpack.decode(self._places.runs.read_bytes(), type=list[Run]):
                self._attach(run)
        if self._journal.entries:
            self.clock.catch_up(self._journal.latest_ns)
            self._service.restore(self._caught_up(self._journal.read()), self._journal.known)

    def _caught_up(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        """What happened was before now, whatever this machine's clock says."""
        for entry in entries:
            self.clock.catch_up(entry.t)
            yield entry

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    async def ping(self) -> dict[str, Any]:
        """That it lives: its process, its session, what it holds in memory (bytes)."""
        await self._open()
        return {"pid": os.getpid(), "incarnation": self._incarnation, "entries": self._journal.entries}

    # --- drivers come and go ------------------------------------------------------------------------------

    async def join(self, request: bytes, crews: bytes) -> bytes:
        """A driver introduces itself; a `JoinAnswer`."""
        await self._open()
        self._check()
        asked = msgspec.msgpack.decode(request, type=wire.JoinRequest)
        refusal = self._refusal(asked)
        if self._closing or refusal:
            return wire.pack(wire.JoinAnswer(closing=self._closing, refusal=refusal))
        names = self._names(asked)
        plans = msgspec.msgpack.decode(crews, type=list[CrewPlan])
        run = Run(run=asked.run, crews=tuple(plan.renamed(name) for plan, name in zip(plans, names, strict=True)))
        self._attach(run)
        self._keep_runs()
        return wire.pack(
            wire.JoinAnswer(
                names=tuple(names),
                epoch_ns=self._epoch_ns,
                now_ns=self.clock.now_ns(),
                directory=str(self._places.disk),
                devices=self._fleet.devices,
            )
        )

    def _refusal(self, asked: wire.JoinRequest) -> str:
        mine = {"cluster": self._cluster, "demand": self._demand, "options": self._options}
        theirs = {"cluster": asked.cluster, "demand": asked.demand, "options": asked.options}
        for what, value in mine.items():
            if theirs[what] != value:
                return f"the control plane there runs with another {what}: {value} there, {theirs[what]} here"
        return ""

    def _names(self, asked: wire.JoinRequest) -> list[str]:
        """Each as asked, if no driver ever had it: the scheduler takes what one says for what an earlier one said
        late, also where that one was lost before it registered anything."""
        ledger = self._service.state.ledger
        had = {crew.id for link in self._links.values() for crew in link.run.crews}
        taken = had | ledger.books.keys() | ledger.ended.keys()
        return [name if name not in taken else f"{name}@{asked.run}" for name in asked.pipelines]

    def _attach(self, run: Run) -> None:
        link = self._links[run.run] = _Link(run, asyncio.get_running_loop().time())
        for crew in run.crews:
            self._fleet.know(crew)
            self._service.attach(crew.id, _Client(link, crew.id))

    def _keep_runs(self) -> None:
        half = self._places.runs.with_suffix(".half")
        half.write_bytes(msgspec.msgpack.encode([link.run for link in self._links.values()]))
        half.rename(self._places.runs)

    async def leave(self, run: str) -> bool:
        """The driver has nothing left here. Whether it was the last: then it is to take the control plane down."""
        link = self._links.pop(run, None)
        if link is not None:
            self._detach(link)
            self._keep_runs()
        self._closing = self._closing or not self._links
        return self._closing

    def _detach(self, link: _Link) -> None:
        for crew in link.run.crews:
            self._service.detach(crew.id)

    async def close(self) -> None:
        """Stop serving, and remove everything but this process."""
        self._closing = True
        for task in (self._serving, getattr(self, "_watch", None)):
            if task is not None:
                task.cancel()
        await self._fleet.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._journal.due:
                with suppress(OSError):  # no room: then a restart reads more of the journal
                    self._journal.keep(self._service.snapshot())
            self._look_for_the_silent(asyncio.get_running_loop().time())

    def _look_for_the_silent(self, now: float) -> None:
        for link in list(self._links.values()):
            silence = now - link.heard
            if silence > self._options.heartbeat_s:
                self._lost(link, f"its driver said nothing for {silence:.0f} s")

    def _lost(self, link: _Link, why: str) -> None:
        del self._links[link.run.run]
        self._detach(link)
        self._keep_runs()
        for crew in link.run.crews:
            self._service.tell(events.ClientLost(pipeline=crew.id, reason=why))

    # --- the line -----------------------------------------------------------------------------------------

    async def listen(self, run: str, incarnation: str, after: int, seen: int) -> tuple[str, int, list[bytes]]:
        """The next frames for a driver, which has taken in everything before number `after` of this incarnation, and
        the first `seen` entries of the log. Raises KeyError for a driver that was given up."""
        await self._open()
        self._check()
        link = self._links[run]
        link.heard = asyncio.get_running_loop().time()
        if incarnation != self._incarnation:
            self._synchronise(link, seen)
            after = 0
        upto, frames = await link.outbox.fetch(after, FETCH_WAIT_S)
        link.heard = asyncio.get_running_loop().time()
        self._check()
        return self._incarnation, upto, frames

    def _synchronise(self, link: _Link, seen: int) -> None:
        """Begin the outbox anew: the entries it has not seen, and which gates are open."""
        link.outbox = Outbox()
        link.synced = True
        link.said = 0
        for lines in self._journal.chunks(seen, self._journal.entries):
            link.outbox.frame(wire.Entries(lines=lines))
        for crew in link.run.crews:
            book = self._service.state.ledger.books.get(crew.id)
            client = _Client(link, crew.id)
            for engine in book.engines if book is not None else ():
                if self._service.state.serves(crew.id, engine.dp_rank, engine.epoch):
                    client.open_gate(engine.dp_rank, engine.version, engine.epoch)
                else:
                    client.close_gate(engine.dp_rank)

    async def say(self, run: str, incarnation: str, number: int, frames: bytes) -> bool:
        """What a driver has to say, in order; `number` is that of the first frame. False if it talks to an earlier
        incarnation: nothing was taken in."""
        await self._open()
        self._check()
        link = self._links[run]
        link.heard = asyncio.get_running_loop().time()
        if incarnation != self._incarnation:
            return False
        said = wire.unpack_up(frames)
        known, link.said = max(0, link.said - number), max(link.said, number + len(said))
        for frame in said[known:]:
            if isinstance(frame, wire.Answered):
                self._service.answered(frame.action, frame.failure)
            elif isinstance(frame.event, events.Message):
                self._service.deliver(frame.event)  # type: ignore[arg-type]
            else:
                self._service.tell(frame.event)
        return True

    def _entry(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        """Into the journal first, then to every driver."""
        line = self._journal(i, t_ns, cause, item)
        for link in self._links.values():
            if link.synced:
                link.outbox.line(line)

    def _happened(self, event: events.AnyEvent) -> None:
        self._service.tell(event)

    # --- crews --------------------------------------------------------------------------------------------

    async def launch(self, pipeline: str, epoch: int) -> str | None:
        """Start all workers of a pipeline, which holds its INITIALIZATION lease; why it failed, if it did."""
        await self._open()
        try:
            await self._fleet.launch(pipeline, epoch)
        except TurnstileError as error:
            return str(error)
        return None

    async def inject(self, kind: str, pipeline: str, dp_rank: int) -> str | None:
        """Fault injection, on the real thing; why it could not be done, if so."""
        self._service.tell(
            events.FaultInjected(kind=kind, target=f"{pipeline}/{dp_rank}" if dp_rank >= 0 else pipeline)
        )
        return await self._fleet.inject(kind, pipeline, dp_rank)
