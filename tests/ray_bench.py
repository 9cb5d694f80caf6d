"""The inside of the contract's real world: what runs in the processes of Ray's cluster.

Importing this imports Ray, so its environment must stand before.
"""

import asyncio
from typing import Any

import msgspec
import ray

from backends.ray_gpu.control import ControlPlane
from core import actions, events

Order = actions.BACKEND | actions.OpenGate
Outcome = events.ActionDone | events.ActionFailed


class Bench(ControlPlane):
    """The control plane, which takes orders from a test too: its fleet carries them out as it does its service's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._orders: dict[int, asyncio.Task[Outcome]] = {}

    async def perform(self, number: int, packed: bytes) -> bytes | None:
        """An outcome; None for an order that was given up. `number` is the call's, for `give_up`."""
        await self._open()
        action = msgspec.msgpack.decode(packed, type=Order)
        task = self._orders[number] = asyncio.create_task(self._fleet.perform(action))
        await asyncio.wait([task])
        del self._orders[number]
        return None if task.cancelled() else msgspec.msgpack.encode(task.result())

    async def give_up(self, number: int) -> None:
        """Stop waiting for an order, as the service does past its limit."""
        if number in self._orders:
            self._orders[number].cancel()

    async def arrived(self) -> None:
        """Once whatever the fleet asked of the nodes' agents so far has been begun by them."""
        await self._open()
        await asyncio.gather(*(self._fleet.agent(node).ready.remote() for node in range(self._cluster.nodes)))


async def tokens_in_flight(engine: Any) -> list[int]:
    """Tokens generated so far for each request that is in an engine. `engine`: an `EngineWorker`'s handle."""
    return await engine.__ray_call__.remote(_tokens)


def _tokens(worker: Any) -> list[int]:
    return [len(ticket.tokens) for ticket in worker._engine._in_flight]


def outcome_of(packed: bytes) -> Outcome:
    return msgspec.msgpack.decode(packed, type=Outcome)


RayError = ray.exceptions.RayError
