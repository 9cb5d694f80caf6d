"""Memory of the simulated devices, byte by byte: who holds what, what is still on its way back, and who watches.

Rules of this room:

1. Every byte in use has an owner (one process: `p1/0` is an engine, `p1/actor_train` a trainer) and a kind.
2. Nothing is ever granted beyond a device's capacity: `take` raises `OutOfMemory` with the numbers, and what asked dies
   of it.
3. Giving back is a claim first and a fact later: released bytes stay as `RELEASING` until their lag has passed.
   Without a lag they never come back, until the owner is vacated.
4. What a dead process held comes back by the same road, all of it, whatever was promised for it before.
5. The memory of a lost device is neither used nor free, and never returns.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

import simpy

from backends.sim.calendar import SimEnv
from core.errors import OutOfMemory
from core.events import MemoryUsed
from core.model import Cluster
from core.units import show_gib


class Kind(StrEnum):
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "graphs"
    OPTIMIZER = "optimizer"
    """Optimizer state with gradients and activations."""
    INIT = "initialisation"
    RESIDUE = "residue"
    """What a sleeping process keeps: context, communicators, fragments."""
    BUFFER = "transfer_buffer"
    CACHE = "weight_cache"
    RELEASING = "releasing"
    """Released by its owner, still in use by the device."""


Parts = tuple[tuple[Kind, int], ...]


class Device:
    """One GPU, or the host memory of one node (`id` = -1 - node)."""

    __slots__ = ("capacity", "gone", "held", "id", "used", "watches")

    def __init__(self, id: int, capacity: int) -> None:
        self.id = id
        self.capacity = capacity
        self.used = 0
        self.gone = False
        self.held: dict[str, dict[Kind, int]] = {}
        self.watches: dict[Watch, None] = {}

    def __str__(self) -> str:
        return f"GPU {self.id}" if self.id >= 0 else f"host memory of node {-1 - self.id}"

    @property
    def free(self) -> int:
        return 0 if self.gone else self.capacity - self.used

    def holds(self, owner: str, kind: Kind) -> int:
        kinds = self.held.get(owner)
        return kinds.get(kind, 0) if kinds else 0

    def by_owner(self) -> dict[str, int]:
        return {
            owner: sum(kinds.values()) if len(kinds) > 1 else next(iter(kinds.values()))
            for owner, kinds in self.held.items()
        }

    def add(self, owner: str, kind: Kind, amount: int) -> None:
        kinds = self.held.setdefault(owner, {})
        kinds[kind] = kinds.get(kind, 0) + amount
        self.used += amount

    def remove(self, owner: str, kind: Kind, amount: int) -> None:
        kinds = self.held[owner]
        left = kinds[kind] - amount
        assert left >= 0, f"{owner} gives back {amount} bytes of {kind.value} on {self} and holds {kinds[kind]}"
        self.used -= amount
        if left:
            kinds[kind] = left
            return
        del kinds[kind]
        if not kinds:
            del self.held[owner]


class Watch:
    """Somebody waits until each of these devices shows that much free. `seen` rings with None, or why it never will;
    `shown` is what they showed at that moment, however late whoever waits gets to read it."""

    __slots__ = ("devices", "need", "seen", "shown")

    def __init__(self, env: SimEnv, devices: Sequence[Device], need: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self.need = tuple(need)
        self.seen = simpy.Event(env)
        self.shown: dict[int, int] = {}

    def end(self, why: str | None = None) -> None:
        self.shown = {device.id: device.free for device in self.devices}
        self.seen.succeed(why)

    def settled(self) -> bool:
        return all([device.free >= need for device, need in zip(self.devices, self.need, strict=True)])

    def lost(self) -> str:
        return ", ".join(f"{device} is gone" for device in self.devices if device.gone)


class _Return:
    """Released memory on its way back to the devices: a calendar entry."""

    __slots__ = ("callbacks", "daemon", "memory", "owner", "pieces")
    _ok = True
    label = "memory comes back"

    def __init__(self, memory: "Memory", owner: str, pieces: list[tuple[Device, int]]) -> None:
        self.memory = memory
        self.owner = owner
        self.pieces = pieces
        self.callbacks: Any = _ARRIVE

    def arrive(self) -> None:
        self.memory.arrived(self)


_ARRIVE = (_Return.arrive,)


class Memory:
    """All devices of a cluster. `tell` gets a `MemoryUsed` for each device that changed; None: nobody wants to know."""

    def __init__(self, env: SimEnv, cluster: Cluster, tell: Callable[[MemoryUsed], None] | None) -> None:
        self._env = env
        self._tell = tell
        self.gpus = tuple(Device(gpu, cluster.gpu_memory) for gpu in range(cluster.gpus))
        self.hosts = tuple(Device(-1 - node, cluster.host_memory) for node in range(cluster.nodes))
        self._returning: dict[str, list[_Return]] = {}

    def on(self, gpus: Iterable[int]) -> tuple[Device, ...]:
        return tuple(self.gpus[gpu] for gpu in gpus)

    # --- taking --------------------------------------------------------------------------------------------

    def take(self, owner: str, devices: Sequence[Device], parts: Parts, *, quiet: bool = False) -> None:
        """Take `parts` on every device, or raise `OutOfMemory` and take nothing. `quiet`: not worth a report."""
        amount = sum(size for _, size in parts)
        for device in devices:
            if device.gone:
                raise OutOfMemory(f"{owner} asked for {show_gib(amount)} on {device}, which is gone")
            if device.free < amount:
                raise OutOfMemory(_shortage(owner, device, amount))
        for device in devices:
            for kind, size in parts:
                if size:
                    device.add(owner, kind, size)
        if not quiet:
            self.show(devices)

    def pass_on(self, device: Device, owner: str, kind: Kind, to: str, as_kind: Kind, amount: int) -> None:
        """Let `to` have `amount` bytes that `owner` holds; any it does not hold are taken anew."""
        passed = min(amount, device.holds(owner, kind))
        if passed:
            device.remove(owner, kind, passed)
            device.add(to, as_kind, passed)
        if amount > passed:
            self.take(to, (device,), ((as_kind, amount - passed),))

    # --- giving back ---------------------------------------------------------------------------------------

    def drop(
        self, owner: str, devices: Sequence[Device], kind: Kind, amount: int | None = None, *, quiet: bool = False
    ) -> None:
        """Give back at once (all of the kind, or `amount`) what the owner still holds of it: host memory, buffers."""
        for device in devices:
            there = device.holds(owner, kind)
            if there:
                device.remove(owner, kind, there if amount is None else min(there, amount))
        self._freed(devices, quiet=quiet)

    def release(
        self, owner: str, devices: Sequence[Device], kinds: tuple[Kind, ...], lag: int | None, *, leak: int = 0
    ) -> None:
        """Say that `kinds` are released. They come back after `lag` ns (None: never), but for `leak` bytes on each
        device, which the owner keeps as residue."""
        pieces = []
        for device in devices:
            amount = self._set_aside(owner, device, kinds)
            kept = min(leak, amount)
            if kept:
                self.pass_on(device, owner, Kind.RELEASING, owner, Kind.RESIDUE, kept)
            if amount > kept:
                pieces.append((device, amount - kept))
        if pieces and lag is not None:
            self._schedule(owner, pieces, lag)

    def vacate(self, owner: str, devices: Sequence[Device], lag: int) -> None:
        """The owner is dead: all it holds on `devices` comes back after `lag` ns."""
        for pending in self._returning.pop(owner, ()):
            self._env.cancel(pending)
        pieces = []
        for device in devices:
            amount = self._set_aside(owner, device, tuple(device.held.get(owner, ())))
            if amount:
                pieces.append((device, amount))
        if pieces:
            self._schedule(owner, pieces, lag)

    def arrived(self, back: _Return) -> None:
        """The lag is over."""
        pending = self._returning.get(back.owner)
        if pending is not None and back in pending:
            pending.remove(back)
            if not pending:
                del self._returning[back.owner]
        devices = [device for device, _ in back.pieces if not device.gone]
        for device, amount in back.pieces:
            if not device.gone:
                device.remove(back.owner, Kind.RELEASING, amount)
        self._freed(devices)

    def _set_aside(self, owner: str, device: Device, kinds: tuple[Kind, ...]) -> int:
        """Turn what the owner holds of `kinds` into RELEASING; how much that is."""
        amount = sum(device.holds(owner, kind) for kind in kinds)
        for kind in kinds:
            there = device.holds(owner, kind)
            if there and kind is not Kind.RELEASING:
                device.remove(owner, kind, there)
                device.add(owner, Kind.RELEASING, there)
        return amount

    def _schedule(self, owner: str, pieces: list[tuple[Device, int]], lag: int) -> None:
        back = _Return(self, owner, pieces)
        if lag <= 0:
            self.arrived(back)
            return
        self._returning.setdefault(owner, []).append(back)
        self._env.push(back, self._env._now + lag)  # type: ignore[arg-type]

    # --- watching ------------------------------------------------------------------------------------------

    def watch(self, devices: Sequence[Device], need: Sequence[int]) -> Watch:
        """Watch until every device shows what is needed, all at once. It may be so already (`settled`)."""
        watch = Watch(self._env, devices, need)
        if watch.lost():
            watch.end(watch.lost())
        elif watch.settled():
            watch.end()
        else:
            for device in watch.devices:
                device.watches[watch] = None
        return watch

    def relax(self, watch: Watch, need: Sequence[int]) -> None:
        """Be content with less from now on."""
        watch.need = tuple(need)
        if not watch.seen.triggered and watch.settled():
            self.unwatch(watch)
            watch.end()

    def give_up(self, watch: Watch, why: str) -> None:
        """Too late: end the watch with the numbers."""
        if not watch.seen.triggered:
            self.unwatch(watch)
            seen = ", ".join(f"GPU {d.id} shows {show_gib(d.free)} free" for d in watch.devices)
            watch.end(f"{seen} {why}")

    def unwatch(self, watch: Watch) -> None:
        for device in watch.devices:
            device.watches.pop(watch, None)

    def lose(self, devices: Sequence[Device]) -> None:
        """The devices are gone, with all that was on them."""
        for device in devices:
            device.gone = True
            device.used = 0
            device.held.clear()
        for device in devices:
            for watch in tuple(device.watches):
                self.unwatch(watch)
                watch.end(watch.lost())

    def clear(self, why: str) -> None:
        """The end of the run: everything is free, nothing is on its way, nobody is left watching."""
        for pending in self._returning.values():
            for back in pending:
                self._env.cancel(back)
        self._returning.clear()
        for device in (*self.gpus, *self.hosts):
            device.used = 0
            device.held.clear()
            for watch in tuple(device.watches):
                self.unwatch(watch)
                watch.end(why)

    def _freed(self, devices: Sequence[Device], *, quiet: bool = False) -> None:
        if not quiet:
            self.show(devices)
        for device in devices:
            for watch in tuple(device.watches):
                if watch.settled():
                    self.unwatch(watch)
                    watch.end()

    def show(self, devices: Sequence[Device]) -> None:
        if self._tell is None:
            return
        for device in devices:
            self._tell(MemoryUsed(gpu=device.id, used=device.used, capacity=device.capacity, by=device.by_owner()))


def _shortage(owner: str, device: Device, amount: int) -> str:
    holders = ", ".join(f"{name} {show_gib(size)}" for name, size in device.by_owner().items()) or "nobody"
    return (
        f"out of memory: {owner} asked for {show_gib(amount)} on {device}, which has {show_gib(device.free)} of "
        f"{show_gib(device.capacity)} free (held: {holders})"
    )
