"""How a version gets into one engine: from the trainer's memory if that can be, else from the cache.

Never worse than the cache: whatever goes wrong on a direct way, the same version is loaded from there, and the reason
is told with the delivery.
"""

import asyncio
import socket
import time
from typing import Any

import msgspec
import ray

from backends.ray_gpu.failures import first_line
from backends.ray_gpu.meeting import LOOPBACK
from backends.ray_gpu.places import engine_name, namespace_of, trainer_name
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.ways import Way
from backends.ray_gpu.weights.choice import Transport
from backends.ray_gpu.weights.manifest import Manifest
from backends.ray_gpu.weights.transports import BACKENDS, Meeting
from backends.ray_gpu.workers.lender import Loan, nccl_settings
from core.errors import OperationFailed, WorldError
from core.model import Record, Role


class Delivery(Record, frozen=True, kw_only=True):
    """How a version came."""

    version: int
    transport: Transport
    why: str
    meant: Transport
    """The way that was meant to be taken."""
    seconds: float


class Borrower:
    """Of one engine's process."""

    def __init__(self, plan: CrewPlan, rank: int, way: Way) -> None:
        self._plan = plan
        self._name = engine_name(rank)
        self._way = way
        self._trainer: Any = None
        self._joined = False

    async def bring(self, engine: Any, manifest: Manifest, version: int) -> Delivery:
        """Load a version, whose published copy is pinned. Raises OperationFailed if the cache's is damaged, too."""
        began = time.monotonic()
        meant = self._way.meant
        transport, why = meant.transport, meant.why
        if transport != "cache":
            obstacle = await self._directly(engine, manifest, version, transport)
            if obstacle:
                transport, why = "cache", obstacle
        if transport == "cache":
            await engine.update_weights(manifest, version, self._plan.verify_weights)
        seconds = time.monotonic() - began
        return Delivery(version=version, transport=transport, why=why, meant=meant.transport, seconds=seconds)

    async def _directly(self, engine: Any, manifest: Manifest, version: int, transport: Transport) -> str:
        """Load it from the trainer's memory; empty, or why that could not be."""
        try:
            trainer = await self._find_trainer()
            label = engine.ipc_label(manifest) if transport == "ipc" else None
            loan = await trainer.lend.remote(self._name, version, label, nccl_settings())
            if loan.refusal:
                return loan.refusal
            try:
                if transport == "ipc":
                    await engine.update_weights_ipc(
                        [loan.payload], manifest, version, loan.digest, self._plan.verify_weights
                    )
                else:
                    await self._receive(engine, trainer, manifest, version, loan)
            finally:
                await trainer.give_back.remote(self._name)
        except (WorldError, ray.exceptions.RayError) as error:
            return f"{transport} failed: {first_line(error)}"
        return ""

    async def _find_trainer(self) -> Any:
        """Handle of its first rank, which lends."""
        if self._trainer is None:
            name, namespace = trainer_name(Role.ACTOR_TRAIN, 0), namespace_of(self._plan.id)
            try:
                self._trainer = await asyncio.to_thread(ray.get_actor, name, namespace)
            except ValueError as error:
                raise OperationFailed("there is no trainer") from error
        return self._trainer

    async def _receive(self, engine: Any, trainer: Any, manifest: Manifest, version: int, loan: Loan) -> None:
        try:
            if not self._joined:
                await self._meet(engine, trainer)
            sent = trainer.send.remote(self._name)
            await engine.update_weights_broadcast(manifest, version, loan.digest, self._plan.verify_weights)
            await sent
        except (WorldError, ray.exceptions.RayError):
            # Whatever state the group is in: the next sync makes another.
            self._joined = False
            await engine.leave()
            raise

    async def _meet(self, engine: Any, trainer: Any) -> None:
        """Form a process group with the trainer; it lasts as long as both processes."""
        port = _free_port()
        meeting = Meeting(
            name=f"{self._plan.id}/{self._name}/{port}", port=port, ranks=self._plan.job.spec.infer.tp,
            backend=BACKENDS[self._plan.device], timeout_s=2 * self._plan.job.spec.limits.sync / 1e9,
        )  # fmt: skip
        met = trainer.meet.remote(self._name, msgspec.msgpack.encode(meeting))
        await engine.join(meeting)
        await met
        self._joined = True


def _free_port() -> int:
    """On loopback. Not reserved: where somebody is quicker, this sync goes through the cache."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])
