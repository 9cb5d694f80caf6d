"""Every error Turnstile raises, and whose fault it is.

    TurnstileError
    ├── RequestError            the caller's fault; goes back to the caller, nobody else notices
    │   ├── ConfigError         a file, option or environment variable is wrong (exit 2)
    │   │   └── TopologyError   the declared world is impossible (exit 2)
    │   ├── UnknownName         a pipeline, worker group, engine or request that was never declared
    │   ├── StaleLease          the epoch named is no longer the holder's
    │   └── Conflict            it contradicts what the same caller said before
    │       └── Displaced       the scheduler listens to another client of that name
    ├── WorldError              the world's fault: hardware, a process, the network
    │   ├── OperationFailed     an engine or trainer operation ended in an error
    │   ├── OutOfMemory         a device or host had less free memory than was asked for
    │   └── PipelineFailed      a pipeline ended before its steps were done
    ├── ProtocolError           a backend broke the plugin contract (ours, or a plugin's)
    ├── InvariantBroken         the scheduler's own books do not add up: a bug in Turnstile
    └── SimulationError         only raised inside the simulator
        ├── Deadlock            nothing can happen any more and somebody still waits
        ├── Livelock            too many steps within one instant of virtual time
        └── FencedCall          code reached for the real world (clock, thread, socket) from virtual time

Every class takes positional arguments only and rebuilds from ``args``: SimPy re-creates failures as
``type(e)(*e.args)`` and Ray does the same through pickle. One test walks over all subclasses.
"""


class TurnstileError(Exception):
    """Root of the tree. ``str(error)`` is one line a person can act on."""


class RequestError(TurnstileError):
    """The caller asked for something that cannot be; nothing was changed."""


class ConfigError(RequestError):
    """Bad input: what was wrong, where, and what to do. ``ConfigError(where, problem, remedy="")``."""

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        super().__init__(where, problem, remedy)
        self.where = where
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{head}; {self.remedy}" if self.remedy else head


class TopologyError(ConfigError):
    """The declared cluster and pipelines cannot exist together."""


class UnknownName(RequestError):
    """Names something that was never declared."""


class StaleLease(RequestError):
    """The lease epoch is not the holder's current one."""


class Conflict(RequestError):
    """Contradicts what the same caller said before (a second registration with other mappings, say)."""


class Displaced(Conflict):
    """The scheduler listens to another client of this name: an earlier one that is not over, or a later one."""


class WorldError(TurnstileError):
    """Something outside Turnstile failed."""


class OperationFailed(WorldError):
    """An operation on an engine or a trainer ended in an error."""


class OutOfMemory(WorldError):
    """A device or host had less free memory than was asked for."""


class PipelineFailed(WorldError):
    """A pipeline ended before its steps were done. ``PipelineFailed(pipeline, reason)``."""

    def __init__(self, pipeline: str, reason: str) -> None:
        super().__init__(pipeline, reason)
        self.pipeline = pipeline
        self.reason = reason

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} failed: {self.reason}"


class ProtocolError(TurnstileError):
    """A backend broke the plugin contract, for example with two outcomes for one action."""


class InvariantBroken(TurnstileError):
    """The scheduler's books do not add up. Always a bug in Turnstile; please report it with the log."""


class SimulationError(TurnstileError):
    """Raised only inside the simulator."""


class Deadlock(SimulationError):
    """Nothing can happen any more and somebody still waits; the argument is the explanation."""


class Livelock(SimulationError):
    """Too many steps within one instant of virtual time."""


class FencedCall(SimulationError):
    """Code under virtual time reached for the real world; the message names the call and the fix."""
