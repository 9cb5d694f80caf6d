"""kill -9 in every phase, on real workers: whoever dies and whatever it was doing, the others do all of their steps,
the message says what happened, and nothing is left.

One cluster, on which everything happens. It takes minutes, so `make test` leaves it out (`test_ray_backend.py` kills
one of each kind in every test run). A few of the deaths, and all of them with what came of each:

    pytest -m whole -k few tests/test_ray_deaths.py
    pytest -m whole -k all -s tests/test_ray_deaths.py
"""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ray_deaths import Diary, Doing, kill_while, make_model, nobody_holds_anything
from ray_world import ACTORS, SMALL, Cluster, Place, Run, marked, pipeline, scenario, until

from core import events

pytestmark = pytest.mark.whole

for package in ("ray", "torch", "megatron", "transformers"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

TRAINER = ("init", "onload", "train", "publish", "offload")
ENGINE = ("generate", "sleep", "wake", "sync", "start")
SIZE = {"nodes": 1, "gpus_per_node": 16, "host_memory_gib": 16}
PATIENCE_S = 600
"""Limits of what is held back on purpose, or waits while its engine is started again on a busy machine."""
STEPS_A_DEATH = 5
"""Of the pipeline that loses its engine and its control plane again and again: more than it does until it goes on."""
FOREVER = 100_000
OTHER_STEPS = 2
"""Of the pipeline that initialises while the control plane dies."""


class Death(NamedTuple):
    """Who dies, in the middle of what."""

    victim: str
    doing: str

    @property
    def pipeline(self) -> str:
        """Whose. `s` is to survive everything, and `c` the control plane's death while it initialises."""
        if self == INITIALISING:
            return "c"
        return "s" if self.victim in ("engine", "control plane", "agent") else f"{self.victim}-{self.doing}"

    @property
    def run(self) -> str:
        """Which driver's; those whose workers die share one."""
        return "failing" if self.victim in ("trainer", "desk") else self.pipeline


INITIALISING = Death("control plane", "init")
ALL = (
    Death("driver", "wait"),
    *(Death("trainer", phase) for phase in TRAINER),
    Death("driver", "generate"),
    Death("driver", "train"),
    Death("desk", "generate"),
    *(Death("engine", phase) for phase in ENGINE),
    *(Death("control plane", phase) for phase in (*TRAINER[1:], *ENGINE)),
    *(Death("agent", phase) for phase in ("train", "offload")),
    Death("driver", "init"),
    INITIALISING,
)
"""In the order in which they happen."""
FEW = tuple(
    Death(*words.rsplit(" ", 1))
    for words in (
        "driver wait", "trainer init", "trainer publish", "engine sync", "control plane train", "control plane start",
        "control plane init",
    )
)  # fmt: skip
OWN = tuple(death.pipeline for death in ALL if death.run != "s")
"""Pipelines that a death of their own happens to; each has a GPU of its own."""
LATE = (Death("driver", "init"), INITIALISING)
"""Their runs start when it is their turn: initialisations come one after another, and this one is waited for."""


class Deaths:
    """Everything that happens, and what was seen of it."""

    def __init__(self, place: Place, cluster: Cluster, deaths: tuple[Death, ...], model: Path) -> None:
        self.place, self.cluster, self.deaths = place, cluster, deaths
        self.held = place.folder / "held"
        self.held.touch()
        self.steps = STEPS_A_DEATH * (1 + sum(death.run == "s" for death in deaths))
        self.workload = SMALL | {"model": str(model), "max_tokens": 12}
        self.left: dict[str, list[str]] = {}
        """What was left of each pipeline that ended, once it was over."""
        self.seen: dict[Death, tuple[int, float]] = {}
        """How many entries the journal had when somebody died; and seconds until those who can went on, or all was
        over."""
        self.runs: dict[str, Run] = {}
        held = {"reward": "tests.ray_world:held", "reward_limit_s": PATIENCE_S}
        self._start("s", self._pipeline("s", 0, self.steps, **held))
        until(lambda: [file for file in place.disk().glob("journal.jsonl") if file.stat().st_size], "the control plane")
        self.memory = cluster.memory[0] / f"turnstile-{place.session()}"
        self.diary = Diary(place.disk() / "journal.jsonl")
        until(lambda: self.diary.count(events.PhaseStarted, phase="init"), "the survivor's beginning")
        self._start_others([death for death in deaths if death not in LATE])
        for death in deaths:
            self._happen(death)
        self._see_the_end()

    # --- who runs -----------------------------------------------------------------------------------------------

    def _pipeline(self, name: str, gpu: int, steps: int, **workload: Any) -> dict[str, Any]:
        return pipeline(name, gpu, [gpu], steps, workload=self.workload | workload, reissue_after_s=PATIENCE_S)

    def _start_others(self, deaths: list[Death]) -> None:
        pipelines: dict[str, list[dict[str, Any]]] = {}
        for death in deaths:
            if death.run != "s":
                steps = OTHER_STEPS if death == INITIALISING else FOREVER
                own = self._pipeline(death.pipeline, 1 + OWN.index(death.pipeline), steps)
                pipelines.setdefault(death.run, []).append(own)
        for run, its in pipelines.items():
            self._start(run, *its)

    def _start(self, name: str, *pipelines: dict[str, Any]) -> None:
        self.runs[name] = self.place.run(
            name, "scenarios.run", scenario(self.place.folder, name, SIZE, *pipelines), "--backend", "ray_gpu",
            "--device", "cpu", "--address", self.cluster.address, "--json", "-",
            "--output", str(self.place.folder / f"{name}-out"),
        )  # fmt: skip

    # --- what happens -------------------------------------------------------------------------------------------

    def _happen(self, death: Death) -> None:
        if death in LATE:
            self._start_others([death])
        if death.run == "s":
            self.held.unlink()  # else it stays in the middle of a rollout
        if death.doing == "start":
            self._kill(Death("engine", "generate"))  # so that there is something to start
        self._kill(death)
        died, began = len(self.diary.entries), time.monotonic()
        if death.run == "s":
            self._goes_on()
            self.held.touch()
        elif death.run == "failing":
            self._see_end_of(death)
        self.seen[death] = (died, time.monotonic() - began)

    def _kill(self, death: Death) -> None:
        run = self.runs[death.run]
        kill_while(
            self.diary, Doing(death.pipeline, death.doing), lambda: self._victim(death),
            lambda: run.process.poll() is not None,
        )  # fmt: skip

    def _victim(self, death: Death) -> int:
        match death.victim:
            case "driver":
                return self.runs[death.run].process.pid
            case "control plane" | "agent":
                actor = "ray::ControlPlane" if death.victim == "control plane" else "ray::NodeAgent"
                return next((pid for pid, title in marked(self.place.mark).items() if title.startswith(actor)), 0)
        name = {"trainer": "actor_train-0", "engine": "engine-0", "desk": "desk"}[death.victim]
        return self.place.worker(f"{death.pipeline}/{name}")

    def _goes_on(self) -> None:
        """Wait for two more steps of the survivor: one of them was begun after the death."""
        enough = self.diary.count(events.StepCompleted, pipeline="s") + 2

        def there() -> bool:
            there = self.diary.count(events.StepCompleted, pipeline="s") >= enough
            assert there or self.runs["s"].process.poll() is None, self.runs["s"].said()
            return there

        until(there, "two more steps of the survivor")

    def _see_end_of(self, death: Death) -> None:
        """Of a pipeline that ended by a death: its workers and its weights are gone, its GPU is free."""
        name = death.pipeline
        until(lambda: self.diary.over(name), f"the end of {name}")
        workers = [f"{name}/{worker}" for worker in ("actor_train-0", "engine-0", "desk")]
        living = [f"{worker} lives" for worker in workers if self.place.worker(worker)]
        held = [f"GPU {gpu.id}" for gpu in self.diary.state.ledger.gpus if gpu.lease and gpu.lease.book.id == name]
        self.left[name] = living + held + [str(file) for file in self.memory.glob(f"{name}/*")]

    def _see_the_end(self) -> None:
        for death in self.deaths:
            if death.victim == "driver":
                self._see_end_of(death)
        self.codes = {name: run.wait() for name, run in self.runs.items() if name != "s"}
        self.held.unlink()
        self.codes["s"] = self.runs["s"].wait()
        self.processes = self.cluster.processes(*ACTORS)
        self.diary.look()
        self.result = {name: run.result() for name, run in self.runs.items() if not name.startswith("driver")}

    def error(self, death: Death) -> str:
        """What a pipeline is said to have ended with."""
        found = self.result[death.run]["pipelines"]
        return next(one["error"] for one in found if one["id"] == death.pipeline)

    def table(self) -> str:
        """What came of each death, for people."""
        rows = ["", "| who | in the middle of | what the log says of it | s | left |", "|---|---|---|---:|---|"]
        for death, (died, passed) in self.seen.items():
            said = self.diary.trouble(death.pipeline, died) if death.victim not in ("control plane", "agent") else ""
            left = ", ".join(self.left.get(death.pipeline, ())) or "-"
            rows.append(f"| {death.victim} | {death.doing} | {said or '-'} | {passed:.1f} | {left} |")
        for result in self.result.values():
            rows += [f"{one['id']}: {one['steps_done']} steps, {one['error']}" for one in result["pipelines"]]
        return "\n".join([*rows, f"exit codes: {self.codes}", f"processes left: {self.processes or 'none'}"])


@pytest.fixture(scope="module", params=["few", "all"])
def deaths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaths]:
    model = make_model(tmp_path_factory.mktemp("model") / "larger")
    with Place(tmp_path_factory.mktemp("cache")) as place:
        cluster = Cluster(place)
        try:
            deaths = Deaths(place, cluster.start(nodes=1), FEW if request.param == "few" else ALL, model)
            print(deaths.table())
            yield deaths
        finally:
            cluster.close()


def test_a_pipeline_does_all_of_its_steps_whoever_dies_in_whatever_phase(deaths: Deaths) -> None:
    assert deaths.codes["s"] == 0, deaths.runs["s"].said()
    assert deaths.codes["c"] == 0, deaths.runs["c"].said()
    for name, steps in (("s", deaths.steps), ("c", OTHER_STEPS)):
        (own,) = deaths.result[name]["pipelines"]
        assert (own["steps_done"], own["trajectories"], own["error"]) == (steps, 8 * steps, None)
        assert deaths.result[name]["violations"] == []


def test_a_pipeline_that_loses_its_trainer_or_its_desk_fails_and_says_whose_process_is_gone(deaths: Deaths) -> None:
    assert deaths.codes["failing"] == 1
    assert deaths.result["failing"]["violations"] == []
    for death in deaths.deaths:
        if death.run == "failing":
            worker = "desk" if death.victim == "desk" else "actor_train-0"
            error = deaths.error(death)
            assert death.pipeline in error and worker in error and "its process is gone" in error, error


def test_a_driver_that_dies_is_missed_and_said_so(deaths: Deaths) -> None:
    drivers = [death.pipeline for death in deaths.deaths if death.victim == "driver"]
    assert drivers
    for name in drivers:
        assert deaths.codes[name] == -9
        assert deaths.diary.count(events.ClientLost, pipeline=name) == 1
        assert deaths.diary.count(events.StepCompleted, pipeline=name) < FOREVER


def test_nothing_is_left_of_a_pipeline_that_ended_by_a_death(deaths: Deaths) -> None:
    ended = [death.pipeline for death in deaths.deaths if death.victim in ("trainer", "desk", "driver")]
    assert deaths.left == {name: [] for name in ended}


def test_in_the_end_nobody_holds_anything(deaths: Deaths) -> None:
    assert nobody_holds_anything(deaths.diary.state) == []


def test_in_the_end_no_actor_no_file_and_no_weights_are_left(deaths: Deaths) -> None:
    assert deaths.processes == []
    assert not list(deaths.place.folder.glob("turnstile-*/*"))
    assert list(deaths.cluster.memory[0].iterdir()) == []
