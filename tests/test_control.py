"""The control plane without its cluster: the names it gives to drivers."""

from types import SimpleNamespace

import pytest

from core import events
from core.errors import Displaced
from core.model import Cluster, DemandPolicy
from core.scheduler import decide
from core.state import State
from core.units import gib
from tests.core_world import spec

CLUSTER = Cluster(nodes=1, gpus_per_node=2, gpu_memory=gib(141), host_memory=gib(256))


def names(state: State, run: str, *pipelines: str, joined: tuple[str, ...] = ()) -> list[str]:
    pytest.importorskip("ray", reason="needs the extra ray_gpu")
    from backends.ray_gpu.control import ControlPlane

    crews = [SimpleNamespace(id=name) for name in joined]
    links = {"other": SimpleNamespace(run=SimpleNamespace(crews=crews))}
    plane = SimpleNamespace(_links=links, _service=SimpleNamespace(state=state))
    return ControlPlane._names(plane, SimpleNamespace(run=run, pipelines=pipelines))  # type: ignore[arg-type]


def test_a_name_that_is_free_is_kept() -> None:
    assert names(State(CLUSTER, DemandPolicy.BATCH), "run-2", "p1", "p2", joined=("p3",)) == ["p1", "p2"]


def test_who_joined_keeps_its_names() -> None:
    state = State(CLUSTER, DemandPolicy.BATCH)
    assert names(state, "run-2", "p1", "p2", joined=("p1",)) == ["p1@run-2", "p2"]


def test_no_driver_gets_a_name_whose_driver_was_lost_before_it_registered() -> None:
    """Or its own registration would be taken for one that comes late. p1 had registered, p2 had not."""
    state = State(CLUSTER, DemandPolicy.BATCH)
    decide(state, 1, events.PipelineRegistered(pipeline="p1", seq=0, spec=spec("p1")))
    for name in ("p1", "p2"):
        decide(state, 2, events.ClientLost(pipeline=name, reason="killed"))
    [reply] = decide(state, 3, events.PipelineRegistered(pipeline="p2", seq=0, spec=spec("p2"))).replies
    assert isinstance(reply.error, Displaced), "which is why the name must not be given again"
    [first, second] = names(state, "run-2", "p1", "p2")
    assert (first, second) == ("p1@run-2", "p2@run-2")
    [reply] = decide(state, 4, events.PipelineRegistered(pipeline=second, seq=0, spec=spec(second))).replies
    assert reply.error is None
