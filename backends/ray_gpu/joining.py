"""How a driver gets into a control plane, and out of it again. Blocking calls, outside any event loop but our own."""

import os
import secrets
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends.ray_gpu import wire
from backends.ray_gpu.cluster import living_nodes
from backends.ray_gpu.control import ControlPlane
from backends.ray_gpu.failures import first_line
from backends.ray_gpu.places import CONTROL, CONTROL_NAMESPACE
from backends.ray_gpu.plan import CrewPlan
from core.config import Scenario
from core.errors import ConfigError, TurnstileError
from core.trace import own_version

CONTROL_CALLS = 10_000
CLOSING_S = 30.0
"""How long a control plane that is being taken down is waited for."""


class Joined(NamedTuple):
    """A place in a control plane."""

    control: Any
    run: str
    scenario: Scenario
    epoch_ns: int
    devices: dict[int, str]
    """What each logical GPU really is."""


def join(scenario: Scenario, options: wire.ClusterOptions, crews: list[CrewPlan]) -> Joined:
    """Find the cluster's control plane, or make it, and join it. Raises ConfigError if it refuses."""
    run = secrets.token_hex(3)
    request = wire.JoinRequest(
        run=run, version=own_version(), cluster=scenario.cluster, demand=scenario.demand, options=options,
        pipelines=tuple(crew.id for crew in crews),
    )  # fmt: skip
    packed = msgspec.msgpack.encode(request), msgspec.msgpack.encode(crews)
    deadline = time.monotonic() + CLOSING_S
    while True:
        control = _control(scenario, options)
        try:
            answer = msgspec.msgpack.decode(ray.get(control.join.remote(*packed)), type=wire.JoinAnswer)
        except ray.exceptions.RayActorError:
            answer = wire.JoinAnswer(closing=True)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TurnstileError):
                raise cause from error
            raise ConfigError("--backend ray_gpu", f"the control plane could not start: {first_line(error)}") from error
        if answer.refusal:
            raise ConfigError(
                "--address", answer.refusal, "use the same cluster, policy and devices, or another cluster"
            )
        if not answer.closing:
            return Joined(control, run, _renamed(scenario, answer.names), answer.epoch_ns, answer.devices)
        if time.monotonic() > deadline:
            raise ConfigError("--address", f"the control plane there has been closing for {CLOSING_S:g} s")
        time.sleep(0.2)  # another driver is just taking it down


def _control(scenario: Scenario, options: wire.ClusterOptions) -> Any:
    """On the head node, also after it died: its journal is there."""
    head = NodeAffinitySchedulingStrategy(living_nodes()[0]["NodeID"], soft=False)
    session = f"{os.getpid()}-{secrets.token_hex(4)}"
    return (
        ray.remote(ControlPlane)
        .options(
            name=CONTROL, namespace=CONTROL_NAMESPACE, get_if_exists=True, lifetime="detached", max_restarts=-1,
            num_cpus=0, max_concurrency=CONTROL_CALLS, scheduling_strategy=head,
        )
        .remote(session, scenario.cluster, scenario.demand, options, time.time_ns())
    )  # fmt: skip


def _renamed(scenario: Scenario, names: tuple[str, ...]) -> Scenario:
    """The scenario with the ids that its pipelines got, wherever it names them."""
    new = {job.spec.id: name for job, name in zip(scenario.jobs, names, strict=True)}
    if all(old == name for old, name in new.items()):
        return scenario
    replace = msgspec.structs.replace

    def follow(trigger: Any) -> Any:
        return None if trigger is None else replace(trigger, pipeline=new[trigger.pipeline])

    jobs = tuple(
        replace(
            job, spec=replace(job.spec, id=new[job.spec.id]), start_after=follow(job.start_after),
            dispatch_after=follow(job.dispatch_after),
        )
        for job in scenario.jobs
    )  # fmt: skip
    faults = tuple(replace(fault, pipeline=new.get(fault.pipeline, fault.pipeline)) for fault in scenario.faults)
    return replace(scenario, jobs=jobs, faults=faults)


def leave(joined: Joined) -> None:
    """Leave the control plane; whoever is the last takes it down."""
    with suppress(ray.exceptions.RayError):
        if ray.get(joined.control.leave.remote(joined.run)):
            ray.get(joined.control.close.remote())
            ray.kill(joined.control, no_restart=True)
