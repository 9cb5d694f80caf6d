"""What goes wrong inside real workers, without anybody dying: a slot too small, rewards that fail or take too long.

One run of three pipelines, each on a "GPU" of its own: one ends by each failure that ends a pipeline, and the third has
the failures that do not. Beside it another run asks for a cluster where something else listens.
"""

import re
import secrets
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray_deaths import make_model
from ray_rewards import LIMIT_S
from ray_world import SMALL, Place, Run, logged, marked, pipeline, scenario

for package in ("ray", "torch", "megatron", "transformers"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

STEPS = 3
BUDGET = 128 << 20
"""Bytes of each GPU: less than the larger model's trainer needs."""
HUB_ID = "somebody/larger"


def put_on_hub(cache: Path) -> None:
    """The larger model as the hub's client keeps what it has fetched, in the cache at `cache`."""
    folder = cache / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    revision = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots").mkdir()
    make_model(folder / "snapshots" / revision)


class Failures:
    """The run, and how it ended."""

    def __init__(self, place: Place) -> None:
        put_on_hub(place.folder / "hf")
        place.environment |= {"HF_HOME": str(place.folder / "hf"), "HF_HUB_OFFLINE": "1"}
        self.place = place
        self.log = place.folder / "log.jsonl"
        now_and_then = {"reward": "tests.ray_rewards:now_and_then", "reward_limit_s": LIMIT_S}
        file = scenario(
            place.folder, "failures", {"gpus_per_node": 3, "gpu_memory_gib": BUDGET / (1 << 30)},
            self._pipeline("large", 0, model=HUB_ID),
            self._pipeline("broken", 1, reward="tests.ray_rewards:always"),
            self._pipeline("fine", 2, **now_and_then) | {"max_attempts": 1},
        )  # fmt: skip
        self.run = self._start("failures", file, "--trace", str(self.log))
        with socket.create_server(("127.0.0.1", 0)) as somebody_else:
            elsewhere = f"127.0.0.1:{somebody_else.getsockname()[1]}"
            place.environment |= {"HOME": str(place.folder)}  # where there is no ~/.ray
            self.unknown = self._start("unknown", file, "--address", elsewhere)
            self.unknown.wait()
            place.environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
            self.lost = self._start("lost", file, "--address", elsewhere)
            self.lost.wait()
        self.code = self.run.wait()
        self.left = marked(place.mark)
        self.result = self.run.result()
        self.pipelines = {one["id"]: one for one in self.result["pipelines"]}

    def _start(self, name: str, file: str, *options: str) -> Run:
        return self.place.run(
            name, "scenarios.run", file, "--backend", "ray_gpu", "--device", "cpu", "--json", "-", "--quiet",
            "--output", str(self.place.folder / f"{name}-out"), *options,
        )  # fmt: skip

    @staticmethod
    def _pipeline(name: str, gpu: int, **workload: Any) -> dict[str, Any]:
        """What is declared of memory would do for the tiny model; of a model on the hub nothing else is known."""
        memory = {"train_gib": 0.05, "engine_gib": 0.05, "residue_gib": 0.001, "host_cache_gib": 0.01}
        return pipeline(name, gpu, [gpu], STEPS, memory=memory, workload=SMALL | workload)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failures]:
    with Place(tmp_path_factory.mktemp("cache")) as place:
        yield Failures(place)


def test_a_run_of_which_a_pipeline_failed_exits_with_1_and_leaves_nothing(failures: Failures) -> None:
    assert failures.code == 1, failures.run.said()
    assert failures.result["outcome"] == "failed"
    assert failures.result["violations"] == []
    assert failures.left == {}
    assert not list(failures.place.folder.glob("turnstile-*/*"))


def test_a_worker_that_needs_more_than_its_slot_has_says_who_where_and_how_much(failures: Failures) -> None:
    """The scenario declares too little, and of a model on the hub nobody knows better before it is there."""
    error = failures.pipelines["large"]["error"]
    found = re.fullmatch(
        r"large could not start: (?P<who>[\w-]+): GPU 0: large/(?P=who) \(\w+\) needs (?P<need>\d+) bytes, and "
        r"(?P<free>\d+) of (?P<budget>\d+) are free; (?P<taken>\d+) are held by: .*",
        error,
    )
    assert found, error
    need, free, budget, taken = (int(found[name]) for name in ("need", "free", "budget", "taken"))
    assert budget == BUDGET and free + taken == budget and need > free
    assert failures.pipelines["large"]["steps_done"] == 0


def test_nobody_else_notices(failures: Failures) -> None:
    fine = failures.pipelines["fine"]
    assert (fine["steps_done"], fine["error"]) == (STEPS, None)


def test_a_failed_or_slow_reward_costs_its_trajectory_and_no_other(failures: Failures) -> None:
    dropped = [one["reason"] for one in logged(failures.log, "TrajectoryDropped", pipeline="fine")]
    failed = "given up after 1 attempts: the reward tests.ray_rewards:now_and_then"
    raised, late = f"{failed} raised ValueError: no rule for this completion", f"{failed} took more than {LIMIT_S} s"
    assert (dropped.count(raised), dropped.count(late), len(dropped)) == (2 * STEPS, 2 * STEPS, 4 * STEPS)
    assert failures.pipelines["fine"]["trajectories"] == 4 * STEPS


def test_a_reward_that_always_fails_ends_its_pipeline_after_the_attempts_that_a_trajectory_has(
    failures: Failures,
) -> None:
    assert failures.pipelines["broken"]["error"] == (
        "pipeline broken failed: no trajectory of batch 0 came back: given up after 4 attempts: "
        "the reward tests.ray_rewards:always raised KeyError: 'answer_key'"
    )
    assert failures.pipelines["broken"]["steps_done"] == 0


def test_a_cluster_is_not_joined_without_a_token_and_the_line_says_so(failures: Failures) -> None:
    assert failures.unknown.process.returncode == 2
    said = failures.unknown.said()
    assert "is joined with its token, and there is none here" in said and said.count("\n") == 1, said


def test_a_port_on_which_something_else_listens_is_refused_in_one_line(failures: Failures) -> None:
    assert failures.lost.process.returncode == 2
    said = failures.lost.said()
    assert said.startswith("error: --address: there is no Ray cluster at 127.0.0.1:") and said.count("\n") == 1, said
