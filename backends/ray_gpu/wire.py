"""What driver and control plane say to each other. Plain records; the encoding is msgpack with a tag a record.

A driver *says* messages, telemetry and answers, in order, in batches. The control plane keeps a numbered *outbox* for
each driver, which the driver fetches by long polling; a fetch acknowledges everything before it and is the heartbeat.
Entries of the event log travel as the very bytes that are in the journal.
"""

from typing import Any

import msgspec

from core import actions, errors, events
from core.errors import RequestError, TurnstileError
from core.model import Cluster, DemandPolicy, Record


class Frame(Record, frozen=True, kw_only=True, tag=True):
    """Base of what goes over the wire."""


# --- joining ---------------------------------------------------------------------------------------------


class JoinRequest(Record, frozen=True, kw_only=True):
    """A driver introduces itself. Everything here must agree with what the control plane already has."""

    run: str
    """Unique name of the run."""
    version: str
    """Of Turnstile."""
    cluster: Cluster
    demand: DemandPolicy
    options: "ClusterOptions"
    pipelines: tuple[str, ...]


class ClusterOptions(Record, frozen=True, kw_only=True):
    """How the declared cluster maps to real things; the same for every run that shares a control plane."""

    device: str
    """`cpu` or `cuda`."""
    devices: tuple[int, ...] = ()
    """Physical GPU of each logical one on its node; empty: one each."""
    heartbeat_s: float = 20.0
    """Silence after which a driver counts as dead."""


class JoinAnswer(Record, frozen=True, kw_only=True):
    refusal: str = ""
    """Why not; empty if joined."""
    closing: bool = False
    """The last run is just leaving: ask again, a new control plane will be there."""
    names: tuple[str, ...] = ()
    """The pipelines' ids here: as asked, or with the run's name where that is taken."""
    epoch_ns: int = 0
    now_ns: int = 0
    directory: str = ""
    devices: dict[int, str] = msgspec.field(default_factory=dict)
    """What each logical GPU really is."""


# --- driver to control plane --------------------------------------------------------------------------------


class Said(Frame, frozen=True, kw_only=True):
    """A client message or telemetry."""

    event: events.AnyEvent


class Answered(Frame, frozen=True, kw_only=True):
    """A command was taken (`failure` None) or refused."""

    action: int
    failure: str | None = None


# --- control plane to driver --------------------------------------------------------------------------------


class Entries(Frame, frozen=True, kw_only=True):
    """Lines of the event log."""

    lines: bytes


class Replied(Frame, frozen=True, kw_only=True):
    pipeline: str
    seq: int
    error: tuple[str, tuple[Any, ...]] | None = None


class Commanded(Frame, frozen=True, kw_only=True):
    action: actions.GrantLease | actions.ConfirmRelease | actions.FailPipeline


class GateOpened(Frame, frozen=True, kw_only=True):
    pipeline: str
    dp_rank: int
    version: int
    epoch: int


class GateClosed(Frame, frozen=True, kw_only=True):
    pipeline: str
    dp_rank: int


Up = Said | Answered
Down = Entries | Replied | Commanded | GateOpened | GateClosed

_encode = msgspec.msgpack.Encoder().encode
_up = msgspec.msgpack.Decoder(list[Up])
_down = msgspec.msgpack.Decoder(Down)


def pack(what: Any) -> bytes:
    return _encode(what)


def unpack_up(data: bytes) -> list[Up]:
    return _up.decode(data)


def unpack_down(data: bytes) -> Down:
    return _down.decode(data)


def pack_error(error: TurnstileError | None) -> tuple[str, tuple[Any, ...]] | None:
    return None if error is None else (type(error).__name__, error.args)


def unpack_error(packed: tuple[str, tuple[Any, ...]] | None) -> RequestError | None:
    """The error as it was raised there; a class unknown here becomes its base."""
    if packed is None:
        return None
    name, args = packed
    kind = getattr(errors, name, RequestError)
    return kind(*args)
