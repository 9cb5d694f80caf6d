"""What all parts of the simulated world share: the calendar, the devices, the links, chance, armed faults."""

from collections.abc import Callable

from backends.sim.calendar import SimEnv
from backends.sim.chance import Draws, Price, Stream
from backends.sim.faults import Armed
from backends.sim.link import PINNED_COPY_PER_GPU, TRANSFER_BUCKET, Link
from backends.sim.memory import Device, Memory
from core.backend import Timer
from core.config import Cost, Durations, Scenario
from core.events import AnyEvent
from core.model import Record
from core.units import NS_PER_S


class Options(Record, frozen=True, kw_only=True):
    """What a scenario file does not say, with defaults that are stated here."""

    release_lag: Durations = Durations(parts=((1.0, "uniform", 50_000_000, 500_000_000),))
    """Between "released" and memory seen free, drawn by process and release. Reports speak of 0 to 5 s (incident I28);
    0.05 to 0.5 s is a healthy world. Never more than half the pipeline's release limit: only a fault exceeds that."""
    link_bytes_per_s: int = 0
    """Of each node's link; 0: `PINNED_COPY_PER_GPU` for each of its GPUs."""
    transfer_buffer: int = TRANSFER_BUCKET
    """Staging bytes of a sync on each GPU, at most the cluster's memory margin."""
    heartbeat: int = 30 * NS_PER_S
    """Silence (ns) after which a client counts as lost."""
    memory_events: bool = True
    """Whether to report `MemoryUsed` at every change."""


class World:
    """One simulated cluster, before anybody works in it."""

    def __init__(
        self,
        env: SimEnv,
        scenario: Scenario,
        options: Options,
        emit: Callable[[AnyEvent], None],
        call_at_ns: Callable[..., Timer],
    ) -> None:
        cluster = scenario.cluster
        self.env = env
        self.cluster = cluster
        self.seed = scenario.seed
        self.options = options
        self.tell = emit
        self.call_at_ns = call_at_ns
        self.armed = Armed()
        self.memory = Memory(env, cluster, emit if options.memory_events else None)
        bandwidth = options.link_bytes_per_s or PINNED_COPY_PER_GPU * cluster.gpus_per_node
        self.links = tuple(Link(env, bandwidth) for _ in range(cluster.nodes))
        self.transfer_buffer = min(options.transfer_buffer, cluster.memory_margin)

    def now_ns(self) -> int:
        return self.env._now  # type: ignore[return-value]

    def nodes_of(self, gpus: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(sorted(self.cluster.node_of(gpu) for gpu in gpus)))

    def links_of(self, gpus: tuple[int, ...]) -> tuple[Link, ...]:
        return tuple(self.links[node] for node in self.nodes_of(gpus))

    def hosts_of(self, gpus: tuple[int, ...]) -> tuple[Device, ...]:
        return tuple(self.memory.hosts[node] for node in self.nodes_of(gpus))

    def lags_of(self, owner: str, declared: Cost | None) -> Draws:
        """Lags of a worker's releases: as its pipeline declares them, else the usual ones."""
        if isinstance(declared, int):
            declared = Durations(parts=((1.0, "constant", declared, 0),))
        return Draws(declared or self.options.release_lag, Stream(self.seed, "release", owner))

    def price(self, cost: Cost, what: str, owner: str) -> Price:
        """What `owner` pays for one kind of work."""
        return Price(cost, self.seed, what, owner)
