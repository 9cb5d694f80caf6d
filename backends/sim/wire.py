"""The wire between the clients and the service: carries messages, and loses, delays and doubles them when told to.

Rules of this room:

1. Without a fault a message arrives at once, in the call that sends it.
2. A dead client says nothing more, not even while its tasks unwind. A service that is away hears nothing.
3. A delayed message is a live entry of the calendar: it will arrive.
"""

from collections.abc import Callable

from backends.sim.world import World
from core.events import Message

Deliver = Callable[[Message], None]


class Wire:
    def __init__(self, world: World) -> None:
        self._world = world
        self._cut: dict[str, None] = {}
        self.lives: dict[str, int] = {}
        """By pipeline, which client of that name spoke last."""
        self.deaf = False
        """The service is away."""

    def carry(self, message: Message, deliver: Deliver) -> None:
        armed, pipeline = self._world.armed, message.pipeline
        self.lives[pipeline] = message.life
        if armed.none and not self.deaf and not self._cut:
            deliver(message)
            return
        if self.deaf or pipeline in self._cut or armed.take("lose_message", pipeline):
            return
        late = armed.take("delay_message", pipeline)
        if late:
            self._later(late.duration, message, deliver)
            return
        deliver(message)
        twice = armed.take("duplicate_message", pipeline)
        if twice:
            self._later(twice.duration, message, deliver)

    def cut(self, pipeline: str) -> None:
        """The client is dead. What it sent before may still arrive."""
        self._cut[pipeline] = None

    def _later(self, delay: int, message: Message, deliver: Deliver) -> None:
        def arrive() -> None:
            if not self.deaf:
                deliver(message)

        self._world.call_at_ns(self._world.now_ns() + delay, arrive)
