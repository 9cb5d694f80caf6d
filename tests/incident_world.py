"""Runs for the incident tests: the shipped scenario of an incident, or a variation written as plain data."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from core.config import Scenario
from core.model import DemandPolicy
from core.run import Result, execute
from core.scenario_file import parse_scenario
from core.units import NS_PER_S
from scenarios import catalogue
from scenarios.outcome import unmet

COSTS = {"init": 20, "train": 10, "offload": 1, "onload": 1, "publish": 1, "sync": 1, "sleep": 1, "wake": 1}


class Run:
    """A finished run with its log; times in seconds."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        self.scenario = scenario
        self.log: list[tuple[float, Any]] = []
        self.result: Result = execute(scenario, "sim", [self._listen], **options)
        self.outcome = self.result.outcome
        self.broken = [(violation.rule, violation.detail) for violation in self.result.violations]
        self.pipelines = {pipeline["id"]: pipeline for pipeline in self.result.summary["pipelines"]}

    def _listen(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        self.log.append((t_ns / NS_PER_S, item))

    def all(self, kind: type, /, **fields: Any) -> Iterator[tuple[float, Any]]:
        """Entries of a kind whose fields have these values, with their times."""
        for at, item in self.log:
            if isinstance(item, kind) and all(getattr(item, name) == value for name, value in fields.items()):
                yield at, item

    def times(self, kind: type, /, **fields: Any) -> list[float]:
        return [at for at, _ in self.all(kind, **fields)]

    def fine(self) -> bool:
        """Completed, and no rule broken."""
        return self.outcome == "completed" and not self.broken and not self.result.diagnosis

    def wait(self, pipeline: str) -> float:
        return self.pipelines[pipeline]["max_wait_s"]


@cache
def incident(name: str) -> Run:
    """The shipped scenario, as it must end: everything it expects holds, and no rule is broken."""
    run = Run(catalogue.load(name))
    assert unmet(run.result.summary, run.scenario.expect) == []
    assert run.broken == []
    return run


def under(name: str, demand: str) -> Run:
    """The shipped scenario under another demand policy."""
    return Run(msgspec.structs.replace(catalogue.load(name), demand=DemandPolicy(demand)))


def pipeline(name: str, train: list[int], infer: list[int], tp: int = 1, **keys: Any) -> dict[str, Any]:
    """A pipeline in the words of a scenario file; `costs` adds to the usual ones."""
    given = {"steps": 2, "batch": {"prompts": 8}} | keys
    return {
        "id": name, "train": {"gpus": train}, "infer": {"gpus": infer, "tp": tp}, **given,
        "costs": COSTS | {"trajectory": 10} | keys.get("costs", {}),
    }  # fmt: skip


def world(gpus: int, *pipelines: dict[str, Any], **keys: Any) -> Scenario:
    """A scenario of these pipelines on one node, unless `cluster` says otherwise."""
    cluster = {"gpus_per_node": gpus, "host_memory_gib": 1024} | keys.pop("cluster", {})
    return parse_scenario(json.dumps({"name": "variation", "cluster": cluster, "pipelines": pipelines, **keys}), "test")
