"""Faults: what goes wrong in the simulated world, and when.

Rules of this room:

1. A fault is an entry of the scenario: an instant, a kind, a target. It is a *daemon* entry of the calendar: that
   something may break later is no reason to believe that anything will still happen. What a fault sets going (memory
   on its way back, a late message, the end of an outage) is an ordinary entry.
2. Each fault that strikes is reported as `FaultInjected`, before its consequences.
3. Faults of operations and messages are *armed*: they hit the next `count` of them. Among several, the oldest first.
4. `dp_rank` -1 means every engine of the pipeline; for sleeps, its trainers' offloads too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from core.config import Fault, Scenario
from core.errors import ConfigError
from core.events import ClientLost, FaultInjected, NodeLeft
from core.units import show_s

if TYPE_CHECKING:
    from backends.sim.crew import Crew
    from backends.sim.engine import Engine
    from backends.sim.wire import Wire
    from backends.sim.world import World

ANY = -1

INJECTED = "injected fault"


class Armed:
    """Faults that wait for the operations or messages they are to hit."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], list[tuple[Fault, int]]] = {}

    def arm(self, fault: Fault) -> None:
        self._waiting.setdefault((fault.kind, fault.pipeline), []).append((fault, fault.count))

    @property
    def none(self) -> bool:
        return not self._waiting

    def clear(self) -> None:
        """Call off whatever has not struck yet."""
        self._waiting.clear()

    def take(self, kind: str, pipeline: str, dp_rank: int = ANY) -> Fault | None:
        """The fault that hits this one, if any; it is one fewer then."""
        waiting = self._waiting.get((kind, pipeline))
        if not waiting:
            return None
        for place, (fault, left) in enumerate(waiting):
            if fault.dp_rank in (ANY, dp_rank):
                if left > 1:
                    waiting[place] = (fault, left - 1)
                else:
                    del waiting[place]
                return fault
        return None


class Faults:
    """The faults of one scenario: puts them on the calendar and makes them happen."""

    def __init__(self, world: "World", crews: dict[str, "Crew"], wire: "Wire") -> None:
        self._world = world
        self._crews = crews
        self._wire = wire
        self._alarms: list[Callable[[], None]] = []
        self._outages = 0  # under way; they may overlap
        self.on_kill_client: dict[str, Callable[[], None]] = {}
        self.on_restart: tuple[Callable[[], None], Callable[[], None]] | None = None

    def schedule(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._at(fault.at, partial(self._strike, fault), daemon=True)

    def cancel(self) -> None:
        for cancel in self._alarms:
            cancel()
        self._alarms.clear()

    def _at(self, when: int, callback: Callable[[], None], *, daemon: bool = False) -> None:
        self._alarms.append(self._world.call_at_ns(when, callback, daemon=daemon).cancel)

    def _after(self, delay: int, callback: Callable[[], None]) -> None:
        self._at(self._world.now_ns() + delay, callback)

    def _strike(self, fault: Fault) -> None:
        self._world.tell(FaultInjected(kind=fault.kind, target=target(fault)))
        STRIKES[fault.kind](self, fault)

    def _engines(self, fault: Fault) -> Sequence["Engine"]:
        engines = self._crews[fault.pipeline].engines
        return engines if fault.dp_rank == ANY else (engines[fault.dp_rank],)

    # --- one method a kind ---------------------------------------------------------------------------------

    def _arm(self, fault: Fault) -> None:
        self._world.armed.arm(fault)

    def _kill_engine(self, fault: Fault) -> None:
        for engine in self._engines(fault):
            engine.fall(INJECTED)

    def _hang_engine(self, fault: Fault) -> None:
        for engine in self._engines(fault):
            engine.hang()

    def _slow_engine(self, fault: Fault) -> None:
        for engine in self._engines(fault):
            engine.slow_down(fault.factor)
            if fault.duration:
                self._after(fault.duration, partial(engine.slow_down, 1.0))

    def _kill_trainer(self, fault: Fault) -> None:
        self._crews[fault.pipeline].actor.fall(INJECTED)

    def _hang_trainer(self, fault: Fault) -> None:
        self._crews[fault.pipeline].actor.hang()

    def _kill_client(self, fault: Fault) -> None:
        """The client's process vanishes without a word; its silence is noticed later."""
        pipeline = fault.pipeline
        self._wire.cut(pipeline)
        cancel = self.on_kill_client.get(pipeline)
        if cancel is not None:
            cancel()
        self.miss(pipeline, self._wire.lives.get(pipeline, 0))

    def miss(self, pipeline: str, life: int) -> None:
        """From now on this client sends no heartbeat; past the limit that is noticed."""
        limit = self._world.options.heartbeat
        lost = ClientLost(pipeline=pipeline, reason=f"no heartbeat for {show_s(limit)}", life=life)
        self._after(limit, lambda: self._world.tell(lost))

    def _remove_node(self, fault: Fault) -> None:
        """The node is gone, with its processes, its memory and its GPUs, for good."""
        world = self._world
        cluster, node = world.cluster, fault.node
        gpus = range(node * cluster.gpus_per_node, (node + 1) * cluster.gpus_per_node)
        world.memory.lose((*world.memory.on(gpus), world.memory.hosts[node]))
        world.tell(NodeLeft(node=node))
        for crew in self._crews.values():
            for worker in crew.workers:
                if any(gpu in gpus for gpu in worker.gpus):
                    worker.fall(f"node {node} left")

    def _restart_control_plane(self, fault: Fault) -> None:
        """The service is away for `duration`, and then back without what it had in mind."""
        if self._outages == 0:
            self._wire.deaf = True
            if self.on_restart is not None:
                self.on_restart[0]()
        self._outages += 1
        self._after(fault.duration, self._control_plane_is_back)

    def _control_plane_is_back(self) -> None:
        self._outages -= 1
        if self._outages == 0:
            self._wire.deaf = False
            if self.on_restart is not None:
                self.on_restart[1]()


STRIKES: dict[str, Callable[[Faults, Fault], None]] = {
    "kill_engine": Faults._kill_engine,
    "hang_engine": Faults._hang_engine,
    "slow_engine": Faults._slow_engine,
    "false_release": Faults._arm,
    "leak_residue": Faults._arm,
    "kill_trainer": Faults._kill_trainer,
    "hang_trainer": Faults._hang_trainer,
    "fail_sync": Faults._arm,
    "lose_message": Faults._arm,
    "delay_message": Faults._arm,
    "duplicate_message": Faults._arm,
    "kill_client": Faults._kill_client,
    "remove_node": Faults._remove_node,
    "restart_control_plane": Faults._restart_control_plane,
}

_ON_ENGINES = frozenset(("kill_engine", "hang_engine", "slow_engine", "false_release", "leak_residue", "fail_sync"))
_ON_NO_PIPELINE = frozenset(("remove_node", "restart_control_plane"))


def target(fault: Fault) -> str:
    """What a fault hits, as it is reported."""
    if fault.kind == "remove_node":
        return f"node {fault.node}"
    if fault.kind in _ON_NO_PIPELINE:
        return "control plane"
    return fault.pipeline if fault.dp_rank == ANY else f"{fault.pipeline}/{fault.dp_rank}"


def check(scenario: Scenario) -> None:
    """Raise ConfigError if a fault cannot happen in this world."""
    sizes = {job.spec.id: job.spec.infer.size for job in scenario.jobs}
    for number, fault in enumerate(scenario.faults):
        problem = _problem(fault, sizes, scenario.cluster.nodes)
        if problem:
            raise ConfigError(f"faults[{number}]", *problem)


def _problem(fault: Fault, sizes: dict[str, int], nodes: int) -> tuple[str, str] | None:
    if fault.kind not in STRIKES:
        return f"no fault is called {fault.kind!r}", f"known: {', '.join(STRIKES)}"
    if fault.kind == "remove_node" and not 0 <= fault.node < nodes:
        return f"there is no node {fault.node}", f"the cluster has nodes 0 to {nodes - 1}"
    if fault.kind in _ON_NO_PIPELINE:
        return None
    if fault.pipeline not in sizes:
        return f"there is no pipeline {fault.pipeline!r}", f"known: {', '.join(sizes)}"
    if fault.kind in _ON_ENGINES and not ANY <= fault.dp_rank < sizes[fault.pipeline]:
        return f"{fault.pipeline} has no engine {fault.dp_rank}", f"its engines are 0 to {sizes[fault.pipeline] - 1}"
    if fault.kind == "slow_engine" and not fault.factor > 0:
        return f"factor {fault.factor} is no speed", "give how many times longer everything takes, above 0"
    return None
