"""The Ray backend on CPU, by its command line: what a run leaves, says and survives. The real thing throughout.

Few runs, looked at by many tests: starting a worker takes seconds of a processor.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray_world import (
    ACTORS,
    LOOPBACK,
    ROOT,
    SMALL,
    Cluster,
    Place,
    Run,
    lines,
    listening,
    logged,
    marked,
    pipeline,
    scenario,
    until,
)

from backends.ray_gpu.cluster import connect
from core.errors import ConfigError
from scenarios import replay
from scenarios import run as scenario_run

for package in ("ray", "torch", "megatron", "transformers"):
    if find_spec(package) is None:  # importing it takes seconds, and is the workers' business
        pytest.skip(f"{package} is not installed", allow_module_level=True)

REAL = ("--backend", "ray_gpu", "--device", "cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(cache: Path) -> Iterator[Place]:
    with Place(cache) as place:
        yield place


# --- the incident, alone on this machine ------------------------------------------------------------------------


class Alone:
    """A run of the incident, and what was seen while it ran."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.log = place.folder / "log.jsonl"
        self.output = place.folder / "out"
        self.run = place.run(
            "incident", "scenarios.overlap_2gpu", *REAL, "--steps", "2", "--verify-weights", "--json", "-", "--quiet",
            "--trace", str(self.log), "--output", str(self.output), python=("-X", "importtime"),
        )  # fmt: skip
        until(lambda: place.events("Note", kind="rollout_granted", pipeline="p2"), "p2's first engines")
        self.session = place.session()
        self.seen = marked(place.mark)
        self.ports = listening(self.seen)
        self.memory = Path(f"/dev/shm/turnstile-{self.session}")
        self.cached = sorted(entry.name for entry in self.memory.iterdir())
        self.code = self.run.wait()
        self.left = {pid: name for pid, name in marked(place.mark).items() if pid in self.seen}
        self.summary = self.run.result()


@pytest.fixture(scope="module")
def alone(cache: Path) -> Iterator[Alone]:
    with Place(cache) as place:
        yield Alone(place)


def test_the_incident_runs_to_its_end_on_real_workers(alone: Alone) -> None:
    assert alone.code == 0, alone.run.said()
    summary = alone.summary
    assert (summary["backend"], summary["outcome"], summary["violations"]) == ("ray_gpu", "completed", [])
    assert summary["diagnosis"] is None
    assert [(one["id"], one["steps_done"], one["trajectories"], one["error"]) for one in summary["pipelines"]] == [
        ("p1", 2, 64, None), ("p2", 2, 64, None)
    ]  # fmt: skip
    assert summary["handovers"] > 0
    for gpu in summary["gpus"]:
        assert gpu["busy_s"] > 0
        assert gpu["busy_s"] + gpu["switching_s"] + gpu["idle_s"] == pytest.approx(summary["makespan_s"], abs=1e-6)


def test_the_log_of_a_real_run_replays_to_the_same_actions(alone: Alone, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(alone.log)]) == 0
    assert "same actions" in capsys.readouterr().out


def test_the_output_folder_tells_the_reward_of_every_step(alone: Alone) -> None:
    for name in ("p1", "p2"):
        trained = [line for line in lines(alone.output / f"{name}.jsonl") if line["phase"] == "train"]
        assert [line["step"] for line in trained] == [1, 2]
        assert all(0 <= line["reward"] <= 1 and line["grad_norm"] >= 0 for line in trained)


def test_a_run_says_nothing_but_its_result(alone: Alone) -> None:
    said = [line for line in alone.run.err.read_text().splitlines() if not line.startswith("import time:")]
    assert said == []


def test_a_driver_imports_nothing_heavy(alone: Alone) -> None:
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in alone.run.err.read_text().splitlines()}
    assert {"ray", "msgspec"} <= imported  # it can be seen at all
    assert not {"torch", "transformers", "megatron", "sglang", "simpy"} & imported


def test_weights_lie_in_shared_memory_while_a_run_lasts_and_no_longer(alone: Alone) -> None:
    assert alone.cached == ["p1", "p2"]
    assert not alone.memory.exists()


def test_a_run_leaves_no_process_and_no_folder(alone: Alone) -> None:
    titles = [title for name in ACTORS for title in alone.seen.values() if title.startswith(f"ray::{name}")]
    assert len(titles) == 2 + 2 * 4, alone.seen  # a control plane, an agent; trainer, two engines and desk of each
    assert alone.left == {}
    assert not list(alone.place.folder.glob("turnstile-*/*"))


def test_a_run_of_its_own_can_be_reached_from_this_machine_only(alone: Alone) -> None:
    assert alone.ports, "nothing listens at all"
    elsewhere = {address: alone.seen[pid] for address, pid in alone.ports.items() if address not in LOOPBACK}
    assert elsewhere == {}


# --- a cluster of two nodes, shared by runs to which everything happens -----------------------------------------

SIZE = {"nodes": 2, "gpus_per_node": 2}
STEPS = 30
"""Of the pipeline to which everything happens: many more than it does unwatched."""
FOREVER = 100_000
"""Steps of pipelines that are ended by force."""


class Story:
    """Four runs on one cluster. Of `survivor`, which has an engine on each node, everything is killed in turn but the
    trainer; the others lose a trainer, their driver, their patience."""

    def __init__(self, place: Place, cluster: Cluster) -> None:
        self.place, self.cluster = place, cluster
        self.held = place.folder / "held"
        self.held.touch()
        workload = SMALL | {"reward": "tests.ray_world:held", "reward_limit_s": 600}
        limits = {"sync_s": 6, "sleep_s": 6, "wake_s": 120}
        self.survivor = self._run(
            "survivor", "--verify-weights",
            pipeline("s", 0, [0, 2], STEPS, limits=limits, workload=workload, reissue_after_s=600),
        )  # fmt: skip
        self.until(lambda: place.session(), "the control plane")
        self.session = place.session()
        self.trainerless = self._run("trainerless", pipeline("t", 1, [1], FOREVER), pipeline("u", 3, [3], 3))
        self.driverless = self._run("driverless", pipeline("d", 3, [3], FOREVER))
        self.kill_trainer_and_driver()
        self.weights_crossed()
        self.engine_and_weights()
        self.miss_driver()
        self.interrupt()
        self.kill_control_plane()
        self.hang_engine()
        self.lose_node()
        self.codes = {run.name: run.wait() for run in (self.survivor, self.trainerless)}
        self.left = cluster.processes(*ACTORS)

    def _run(self, name: str, *given: Any) -> Run:
        options = [one for one in given if isinstance(one, str)]
        file = scenario(self.place.folder, name, SIZE, *(one for one in given if not isinstance(one, str)))
        return self.place.run(
            name, "scenarios.run", file, *REAL, "--address", self.cluster.address, "--json", "-", *options,
            "--trace", str(self.place.folder / f"{name}.jsonl"), "--output", str(self.place.folder / f"{name}-out"),
        )  # fmt: skip

    def events(self, type_: str, /, **fields: Any) -> list[dict[str, Any]]:
        """Items of the whole log, as the longest run wrote it."""
        return logged(self.place.folder / "survivor.jsonl", type_, **fields)

    def until(self, look: Callable[[], Any], what: str) -> None:
        """As the function; not beyond the end of the longest run."""

        def look_or_fail() -> Any:
            found = look()
            assert found or self.survivor.process.poll() is None, f"no {what}: {self.survivor.said()}"
            return found

        until(look_or_fail, what)

    def steps(self, name: str) -> int:
        return len(self.place.events("StepCompleted", pipeline=name))

    def progress(self, name: str) -> None:
        """Wait for another step of a pipeline."""
        before = self.steps(name)
        self.until(lambda: self.steps(name) > before, f"another step of {name} after {before}")

    def step_and_hold(self) -> None:
        """Let the survivor go on for a step or a few, and keep it in the middle of the next rollout."""
        self.held.unlink()
        self.progress("s")
        self.held.touch()

    def opened(self, rank: int) -> int:
        """How often the gate of one of the survivor's engines was opened."""
        return len(self.place.events("OpenGate", pipeline="s", dp_rank=rank))

    # --- what happens -------------------------------------------------------------------------------------------

    def kill_trainer_and_driver(self) -> None:
        self.until(lambda: self.steps("t") >= 1, "a step of the pipeline whose trainer is killed")
        os.kill(self.place.worker("t/actor_train-0"), signal.SIGKILL)
        self.until(lambda: self.steps("d") >= 1, "a step of the run whose driver is killed")
        os.kill(self.driverless.process.pid, signal.SIGKILL)

    def miss_driver(self) -> None:
        self.until(lambda: self.place.events("ClientLost", pipeline="d"), "the control plane to miss the driver")
        self.until(lambda: not self.place.worker("d/engine-0", self.cluster.second), "the end of its workers")

    def weights_crossed(self) -> None:
        self.until(lambda: self.opened(0) and self.opened(1), "both engines of the survivor")
        self.copies = [sorted(file.name for file in self._weights(node).glob("v*/*.bucket")) for node in (0, 1)]

    def _weights(self, node: int) -> Path:
        return self.cluster.memory[node] / f"turnstile-{self.session}" / "s"

    def engine_and_weights(self) -> None:
        """Damage the weights in one node's cache, then kill the engine that will have to load them again."""
        bucket = max(self._weights(0).glob("v*/*.bucket"), key=lambda file: int(file.parent.name[1:]))
        data = bucket.read_bytes()
        bucket.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        before = self.opened(0)
        os.kill(self.place.worker("s/engine-0"), signal.SIGKILL)
        self.until(lambda: self.damaged(), "a sync that finds the damage")
        bucket.write_bytes(data)
        self.until(lambda: self.opened(0) > before, "the engine that was killed")

    def damaged(self) -> list[dict[str, Any]]:
        return [one for one in self.place.events("ActionFailed") if "is damaged" in one["reason"]]

    def kill_control_plane(self) -> None:
        planes = [pid for pid, title in marked(self.place.mark).items() if title.startswith("ray::ControlPlane")]
        assert len(planes) == 1, planes
        os.kill(planes[0], signal.SIGKILL)
        self.step_and_hold()

    def interrupt(self) -> None:
        """Ctrl-C while the workers of a run are being started."""
        self.impatient = self._run("impatient", pipeline("i", 1, [1], 3))
        self.until(lambda: self.place.worker("i/actor_train-0"), "a worker of the run that is interrupted")
        self.impatient.process.send_signal(signal.SIGINT)
        self.interrupted = self.impatient.wait()
        self.interrupted_left = [self.place.worker(f"i/{name}") for name in ("actor_train-0", "engine-0", "desk")]

    def hang_engine(self) -> None:
        before = self.opened(1)
        self.hung = self.place.worker("s/engine-1", self.cluster.second)
        os.kill(self.hung, signal.SIGSTOP)
        self.step_and_hold()
        self.until(lambda: self.opened(1) > before and self._another() > 0, "the engine that hung")
        self.replaced = self._another()

    def _another(self) -> int:
        """The process that is there instead of the one that hung. (Its gate may have been about to open at first.)"""
        pid = self.place.worker("s/engine-1", self.cluster.second)
        return 0 if pid == self.hung else pid

    def lose_node(self) -> None:
        self.cluster.lose_second()
        self.until(lambda: self.place.events("NodeLeft", node=1), "the control plane to miss the node")
        self.held.unlink()


@pytest.fixture(scope="module")
def story(cache: Path) -> Iterator[Story]:
    with Place(cache) as place:
        cluster = Cluster(place)
        try:
            yield Story(place, cluster.start(nodes=2))
        finally:
            cluster.close()


def test_a_run_survives_the_death_of_everything_but_its_trainer(story: Story) -> None:
    assert story.codes["survivor"] == 0, story.survivor.said()
    (own,) = story.survivor.result()["pipelines"]
    assert (own["id"], own["steps_done"], own["trajectories"], own["error"]) == ("s", STEPS, STEPS * 8, None)
    assert story.survivor.result()["violations"] == []


def test_the_log_of_a_run_that_shared_its_cluster_replays_too(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(story.place.folder / "survivor.jsonl")]) == 0
    assert "same actions" in capsys.readouterr().out


def test_weights_cross_to_the_other_node(story: Story) -> None:
    here, there = story.copies
    assert here and there  # each node has a cache of its own
    assert story.events("OpenGate", pipeline="s", dp_rank=1)


def test_damaged_weights_are_found_and_not_served(story: Story) -> None:
    assert "checksum" in next(one for one in story.events("ActionFailed") if "is damaged" in one["reason"])["reason"]


def test_an_engine_that_hangs_is_killed_and_started_again(story: Story) -> None:
    unknown = story.events("ActionUnknown")
    assert any("after 6 s" in one["reason"] for one in unknown), unknown
    assert story.replaced not in (0, story.hung)


def test_a_trainer_that_dies_fails_its_pipeline_and_no_other(story: Story) -> None:
    assert story.codes["trainerless"] == 1
    t, u = story.trainerless.result()["pipelines"]
    # Either the phase it was in notices first, or who watches its life; both name it.
    assert "actor_train-0" in t["error"] and "its process is gone" in t["error"], t["error"]
    assert (u["steps_done"], u["error"]) == (3, None)


def test_a_driver_that_dies_gives_up_its_gpus_and_its_workers(story: Story) -> None:
    lost = story.events("ClientLost", pipeline="d")
    assert len(lost) == 1 and "said nothing" in lost[0]["reason"]
    assert story.events("StopPipeline", pipeline="d")


def test_ctrl_c_while_workers_start_leaves_none_of_them(story: Story) -> None:
    assert story.interrupted == 130, story.impatient.said()
    assert story.impatient.result()["outcome"] == "interrupted"
    assert story.interrupted_left == [0, 0, 0]


def test_a_node_that_leaves_takes_its_engines_and_nothing_else(story: Story) -> None:
    assert len(story.events("NodeLeft")) == 1
    assert story.survivor.result()["outcome"] == "completed"


def test_no_driver_repeats_what_ray_says_of_dead_workers(story: Story) -> None:
    for run in (story.survivor, story.trainerless, story.impatient):
        assert "raylet" not in run.said() and "Traceback" not in run.said()


def test_the_last_run_leaves_no_actor_no_folder_and_no_weights_on_any_node(story: Story) -> None:
    assert story.left == []
    assert not list(story.place.folder.glob("turnstile-*/*")) + list(story.cluster.second.glob("turnstile-*/*"))
    assert [list(folder.iterdir()) for folder in story.cluster.memory] == [[], []]


# --- what is refused before anything starts ---------------------------------------------------------------------

UNKNOWN_MODEL = {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}


def refused(folder: Path, *options: str, **given: Any) -> list[str]:
    """Arguments of a run of one pipeline on one GPU, in which `given` is wrong."""
    workload = given.pop("workload", {})
    own = pipeline("p", 0, [0], 1, workload=SMALL | workload, **given)
    file = scenario(folder, "refused", {"gpus_per_node": 1, "gpu_memory_gib": 0.5}, own)
    return [file, *REAL, "--output", str(folder / "out"), *options]


def _no_model(folder: Path) -> list[str]:
    return refused(folder, "--model", str(folder / "no-such-model"))


def _unknown_architecture(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(UNKNOWN_MODEL))
    return refused(folder, "--model", str(folder))


def _bad_prompts(folder: Path) -> list[str]:
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    return refused(folder, "--prompts", str(file), "--reward", "tests.ray_world:held")


def _no_reward(folder: Path) -> list[str]:
    return refused(folder, "--reward", "no_such_module:reward")


def _critic(folder: Path) -> list[str]:
    return refused(folder, critic={"gpus": [0]})


def _too_large(folder: Path) -> list[str]:
    return refused(folder, workload={"kv_tokens": 16_000_000})


def _output_in_use(folder: Path) -> list[str]:
    (folder / "out").mkdir()
    (folder / "out" / "p.jsonl").touch()
    return refused(folder)


def _nobody_there(folder: Path) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    return refused(folder, "--address", f"127.0.0.1:{port}")


def _children() -> list[int]:
    """Processes that this one has started and that live."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


BAD_INPUT = {
    _no_model: "no-such-model",
    _unknown_architecture: "FalconForCausalLM",
    _bad_prompts: "prompts.jsonl:2",
    _no_reward: "no_such_module:reward cannot be imported",
    _critic: "GRPO on real workers has no worker group critic",
    _too_large: "GPU 0: ",
    _output_in_use: "is not empty",
    _nobody_there: "nothing listens at 127.0.0.1",
}


@pytest.mark.parametrize("bad", BAD_INPUT, ids=[bad.__name__ for bad in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_2_and_starts_nothing(
    bad: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _children()
    assert scenario_run.main(bad(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert BAD_INPUT[bad] in said
    assert [pid for pid in _children() if pid not in before] == []


def test_a_fault_that_real_workers_cannot_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = {"at": 1, "kind": "lose_message", "pipeline": "p"}
    file = scenario(tmp_path, "faulty", {"gpus_per_node": 1}, pipeline("p", 0, [0], 1), faults=[fault])
    assert scenario_run.main([file, *REAL, "--output", str(tmp_path / "out")]) == 2
    assert "lose_message cannot be done to real workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("RuntimeError('Version mismatch: The cluster was started with: Ray: 2.9.3')", "Ray: 2.9.3"),
        ("ray.exceptions.AuthenticationError('no')", "does not take our token; set RAY_AUTH_TOKEN"),
        ("ConnectionError('no GCS')", "there is no Ray cluster at 127.0.0.1:"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_refused_in_one_line(
    raised: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def refuse(**options: Any) -> None:
        raise eval(raised, {"ray": ray})

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(os, "environ", os.environ | {"RAY_AUTH_TOKEN": "0" * 64})
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        address = f"127.0.0.1:{somebody.getsockname()[1]}"
        with pytest.raises(ConfigError) as found:
            connect(address)
    assert words in str(found.value) and "\n" not in str(found.value)


def test_help_imports_neither_ray_nor_torch() -> None:
    asked = "import sys; from scenarios import overlap_2gpu as scenario; scenario.main('overlap_2gpu', ['--help'])"
    look = f"try:\n {asked}\nexcept SystemExit: print([m for m in ('ray', 'torch', 'simpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


# --- a policy that gets stuck -----------------------------------------------------------------------------------


@pytest.mark.whole
def test_the_policy_of_the_incident_gets_stuck_for_real_and_says_why(place: Place) -> None:
    stuck = place.run(
        "stuck", "scenarios.overlap_2gpu", *REAL, "--demand", "signal", "--json", "-", "--quiet",
        "--output", str(place.folder / "out"),
    )  # fmt: skip
    assert stuck.wait() == 3, stuck.said()
    result = stuck.result()
    assert result["outcome"] in ("deadlock", "starved")
    assert "p1" in result["diagnosis"]
    assert marked(place.mark) == {}
