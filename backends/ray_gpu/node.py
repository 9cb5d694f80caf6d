"""The agent of one node: looks at its devices from outside the workers, ends their processes, keeps its shared memory.

Rules of this room:

1. What it holds is on disk or in the devices themselves, so it may die and be started again at any time.
2. Memory is what the devices show, never what a worker says of itself. (A CPU slot shows the pages of its book, which
   end with the process that wrote them.)
3. Nothing heavy is imported: no torch, no model library.
"""

import asyncio
import shutil
import socket
import time

from backends.ray_gpu import janitor
from backends.ray_gpu.devices.watch import Watch, open_watch
from backends.ray_gpu.places import Places, owner
from backends.ray_gpu.processes import Processes
from backends.ray_gpu.weights import manifest as manifests
from backends.ray_gpu.weights.cache import WeightCache
from backends.ray_gpu.weights.store import Store, held_by_pipeline
from backends.ray_gpu.weights.transfer import Receiver, send

FIRST_LOOK_S = 0.002
LONGEST_LOOK_S = 0.05
"""Pause between two looks at the devices, doubled from the first to the longest."""


class NodeAgent:
    """One a node. Methods are called by the control plane and by workers."""

    def __init__(self, session: str, node: int, gpus: dict[int, int], device: str, devices: tuple[int, ...]) -> None:
        """`gpus`: budget in bytes by logical GPU id of this node. `devices`: physical GPU of each, if not its own."""
        self.places = Places(session)
        self.node = node
        self.processes = Processes(self.places.processes)
        self.places.disk.mkdir(parents=True, exist_ok=True)
        self._janitor = janitor.start(session)
        self._gpus = gpus
        self._watch: Watch = open_watch(device, self.places, gpus, devices)
        self._receivers: dict[tuple[str, int], Receiver] = {}
        """Versions that are being copied to this node, by pipeline and version."""

    async def ready(self) -> dict[str, dict[int, str]]:
        """That it lives, and what it found out about its devices: in words, and the UUIDs of real cards."""
        return {"devices": self._watch.describe(), "uuids": self._watch.uuids()}

    # --- memory ----------------------------------------------------------------------------------------

    async def observe(self) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
        """Bytes used on each logical GPU, by owner (the key "" is what belongs to nobody known), and bytes of host
        memory that each pipeline's weights take."""
        return {gpu: self._watch.used_by(gpu) for gpu in self._gpus}, held_by_pipeline(self.places.memory)

    async def await_memory(
        self, need: dict[int, int], expect: dict[int, int], patience_s: float, limit_s: float
    ) -> tuple[bool, dict[int, int]]:
        """Watch until each GPU shows at least `expect` bytes free, or after `patience_s` at least `need`; whether it
        came to that within `limit_s`, and what was seen last."""
        began = time.monotonic()
        pause = FIRST_LOOK_S
        while True:
            free = {gpu: self._watch.free(gpu) for gpu in need}
            passed = time.monotonic() - began
            wanted = expect if passed < patience_s else need
            if all(free[gpu] >= wanted[gpu] for gpu in need):
                return True, free
            if passed >= limit_s:
                return False, free
            await asyncio.sleep(min(pause, max(0.0, limit_s - passed)))
            pause = min(2 * pause, LONGEST_LOOK_S)

    # --- processes -------------------------------------------------------------------------------------

    async def kill(self, pipeline: str, name: str) -> int:
        """End a worker's whole process tree; how many processes it had."""
        return self.processes.kill(owner(pipeline, name))

    async def signal(self, pipeline: str, name: str, number: int) -> int:
        """For fault injection: send a signal to a worker's processes."""
        return self.processes.signal(owner(pipeline, name), number)

    async def clear(self, pipeline: str) -> int:
        """End every worker of the pipeline on this node and remove its weights; how many processes were left."""
        ended = sum(self.processes.kill(name) for name in self.processes.owners(pipeline))
        self._receivers = {key: one for key, one in self._receivers.items() if key[0] != pipeline}
        shutil.rmtree(Store(self.places.memory, pipeline).folder, ignore_errors=True)
        return ended

    async def free_ports(self, count: int) -> list[int]:
        """Ports on loopback that nobody listens on now. Not reserved: who finds one taken fails and says so."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        return ports

    # --- weights that cross nodes -----------------------------------------------------------------------

    async def manifest(self, pipeline: str, version: int) -> bytes:
        """Of a version in this node's cache."""
        return manifests.encode(self._cache(pipeline).find(version))

    async def missing(self, manifest: bytes) -> tuple[int, ...]:
        """Buckets of a version that this node does not have yet; empty if the version is here."""
        wanted = manifests.decode(manifest)
        if wanted.version in self._cache(wanted.pipeline).versions:
            return ()
        key = wanted.pipeline, wanted.version
        if key not in self._receivers:
            self._cache(wanted.pipeline).evict()
            self._receivers[key] = Receiver(self.places.memory, wanted)
        return self._receivers[key].missing

    async def bucket(self, manifest: bytes, index: int) -> bytes:
        """One bucket of a version in this node's cache."""
        return send(manifests.decode(manifest), index)

    async def receive(self, pipeline: str, version: int, index: int, data: bytes) -> None:
        """Take in one bucket of a version from another node; the last one makes it complete."""
        receiver = self._receivers[pipeline, version]
        receiver.receive(index, data)
        if not receiver.missing:
            receiver.commit()
            del self._receivers[pipeline, version]

    def _cache(self, pipeline: str) -> WeightCache:
        return WeightCache(self.places.memory, pipeline, keep=2)

    # --- the end ---------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Remove what the session keeps on this node."""
        janitor.clean(self.places.session)
        self._janitor.communicate(b".")
