"""Options that only some backends take: what they change, what reaches the backend, and what is refused."""

import argparse
import os
from pathlib import Path

import pytest

from backends.sim.backend import SimBackend
from core.backend import Backend
from core.config import Scenario
from core.errors import ConfigError
from core.workload import Workload
from scenarios import backend_options, catalogue, common
from scenarios.backend_options import MACHINE, WORKLOAD
from scenarios.options import declared, parser
from tests.test_cli import summary_of

EVERYTHING = frozenset({*MACHINE, "workload"})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_options, "default_device", lambda: "cpu")


def parsed(*arguments: str) -> argparse.Namespace:
    return parser("scenarios.x", "x").parse_args(arguments)


def settings(*arguments: str, takes: frozenset[str] = EVERYTHING, name: str = "overlap_2gpu") -> dict[str, object]:
    options = parsed("--backend", "real", *arguments)
    return backend_options.backend_options(options, declared(catalogue.load(name), options, {}), takes)


def workloads(*arguments: str) -> set[Workload]:
    return {job.workload for job in declared(catalogue.load("overlap_2gpu"), parsed(*arguments), {}).jobs}


def refusal(*arguments: str, takes: frozenset[str] = EVERYTHING) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*arguments, takes=takes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what reaches the backend ---------------------------------------------------------------------------


def test_a_backend_gets_what_it_takes_and_defaults_for_what_was_not_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = settings()
    folder = Path(found.pop("output"))
    assert found == {
        "device": "cpu", "devices": None, "address": None, "transport": "cache", "verify_weights": False,
        "checkpoint_every": 0, "resume": None,
    }  # fmt: skip
    assert folder.parent == tmp_path / "out" and folder.name.startswith("overlap-2gpu-")
    assert not folder.parent.exists(), "nothing is written before the run"
    assert settings(takes=frozenset({"device"})) == {"device": "cpu"}
    assert settings(takes=frozenset()) == {}


def test_what_was_asked_for_arrives(tmp_path: Path) -> None:
    found = settings(
        "--device", "cuda", "--devices", "0,0", "--address", "10.0.0.1:6379", "--output", str(tmp_path / "run"),
        "--transport", "ipc", "--verify-weights", "--checkpoint-every", "5", "--resume", "earlier",
    )  # fmt: skip
    assert found == {
        "device": "cuda", "devices": (0, 0), "address": "10.0.0.1:6379", "output": str(tmp_path / "run"),
        "transport": "ipc", "verify_weights": True, "checkpoint_every": 5, "resume": "earlier",
    }  # fmt: skip


def test_cards_may_have_budgets_and_be_named_by_uuid() -> None:
    given = "0@60,GPU-5f3b-77@60.5"
    assert settings("--device", "cuda", "--devices", given)["devices"] == ("0@60", "GPU-5f3b-77@60.5")
    assert settings("--device", "cuda", "--devices", "GPU-5f,1")["devices"] == ("GPU-5f", 1)


def test_nccl_is_another_name_of_the_broadcast_on_gpus() -> None:
    assert settings("--device", "cuda", "--transport", "nccl")["transport"] == "broadcast"


def test_a_map_of_one_node_stands_for_all_of_them() -> None:
    scenario = catalogue.load("overlap_4gpu")
    nodes = scenario.cluster.nodes
    each = scenario.cluster.gpus_per_node
    cards = ",".join(["0"] * each)
    assert settings("--device", "cuda", "--devices", cards, name="overlap_4gpu")["devices"] == (0,) * each * nodes


def test_each_policy_of_several_runs_has_a_folder_of_its_own() -> None:
    assert backend_options.for_policy({"device": "cpu", "output": "a/b"}, "floor") == {
        "device": "cpu", "output": "a/b-floor"
    }  # fmt: skip
    assert backend_options.for_policy({}, "floor") == {}


def test_the_default_device_is_decided_by_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cases = ((["null", "nvidia0"], "cuda"), (["dxg"], "cuda"), (["nvidiactl", "nvram"], "cpu"), ([], "cpu"))
    for files, device in cases:
        monkeypatch.setattr(os, "listdir", lambda folder, files=files: files)
        assert backend_options.default_device() == device


# --- what changes the workloads -------------------------------------------------------------------------


def test_a_workload_option_changes_every_pipeline(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").touch()
    prompts = str(tmp_path / "p.jsonl")
    assert workloads() == {Workload()}
    assert workloads("--model", "smollm2", "--task", "sort", "--max-tokens", "9", "--learning-rate", "1e-4") == {
        Workload(model="smollm2", task="sort", max_tokens=9, learning_rate=1e-4)
    }
    assert workloads("--prompts", prompts, "--reward", "a.b:c") == {Workload(prompts=prompts, task="", reward="a.b:c")}


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--device", "cpu"), ("--devices", "0,0"), ("--address", "auto"), ("--output", "x"), ("--transport", "cache"),
        ("--verify-weights",), ("--model", "tiny"), ("--task", "copy"), ("--reward", "a:b"), ("--max-tokens", "3"),
        ("--learning-rate", "0.1"),
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_backend_refuses_what_it_does_not_take(arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert common.main("overlap_2gpu", ["--backend", "sim", "--json", "out.json", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {arguments[0]}: the backend sim does not take it; leave it out\n"
    assert printed.out == "" and list(tmp_path.iterdir()) == []


def test_every_option_is_among_those_refused() -> None:
    defaults = vars(parsed())
    assert all(defaults[name] is None for name in (*MACHINE, *WORKLOAD)), "None: not asked for"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "gpu"), "'gpu' is not one of cpu, cuda"),
        (("--devices", "0,x"), "must be a whole number"),
        (("--devices", ","), "must be a whole number"),
        (("--devices", "0@0,0@0"), "'0@0': a card is its number or GPU-UUID, with @GIB (at least 1)"),
        (("--devices", "0@,1"), "such as 0@60"),
        (("--devices", "GPU-"), "'GPU-': a card is"),
        (("--address", "host"), "'host' is neither HOST:PORT nor auto"),
        (("--address", "host:0"), "neither"),
        (("--address", "host:65536"), "neither"),
        (("--address", "ray://host:10001"), "neither"),
        (("--transport", "nvlink"), "is not one of auto, cache, ipc, broadcast, nccl"),
        (("--task", "srot"), "did you mean 'sort'?"),
        (("--reward", "my_rewards"), "names no function; write module:function"),
        (("--max-tokens", "0"), "from 1 to"),
        (("--learning-rate", "nan"), "must be a number, not nan"),
        (("--learning-rate", "0"), "must be more than 0"),
        (("--learning-rate", "fast"), "must be a number, not 'fast'"),
    ],
)
def test_a_value_that_cannot_be_is_one_line_and_exit_2(arguments, words: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(*arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.err.count("\n") == 1
    assert printed.err.startswith(f"error: argument {arguments[0]}: ") and words in printed.err


@pytest.mark.parametrize("option", ["--devices", "--model", "--output"])
def test_an_empty_value_is_one_line_and_exit_2(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(option, " ")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: the argument after {option} is empty; ")


def test_values_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.touch()
    assert refusal("--devices", "0,0") == "--devices: there are no cards with --device cpu; leave it out"
    assert refusal("--device", "cuda", "--devices", "0") == (
        "--devices: names 1 cards, and the scenario has 2 GPUs; list 2"
    )
    assert refusal("--transport", "nccl") == "--transport: nccl needs GPUs; broadcast is the same through gloo"
    assert "is what its workers take; leave it out" in refusal("--costs", "h200")
    assert refusal("--task", "sort", "--prompts", str(file)) == "--task: --prompts is given too; give one of the two"
    assert refusal("--prompts", str(file)) == "--prompts: needs a reward beside it; add --reward module:function"
    assert refusal("--prompts", "nowhere.jsonl", "--reward", "a:b") == "--prompts: there is no file nowhere.jsonl"
    assert refusal("--output", str(file)) == f"--output: {file} is no folder; name another"
    assert refusal("--output", str(tmp_path)) == f"--output: {tmp_path} is not empty; name a new folder for each run"


# --- through the command line ---------------------------------------------------------------------------


class Real:
    takes = EVERYTHING


def test_a_run_is_started_with_the_settings_and_the_changed_workloads(tmp_path, monkeypatch) -> None:
    runs: list[tuple[Scenario, dict[str, object]]] = []

    def prepare(scenario: Scenario, backend: str, **given: object) -> Backend:
        runs.append((scenario, given))
        return SimBackend(scenario)

    def execute(scenario: Scenario, backend: Backend, listeners, board):
        return summary_of(scenario, backend.name, **({"outcome": "starved"} if scenario.demand == "signal" else {}))

    monkeypatch.setattr(common.core_run, "prepare", prepare)
    monkeypatch.setattr(common, "execute", execute)
    monkeypatch.setattr(common, "load_backend", lambda name: Real)
    folder = tmp_path / "run"
    arguments = ["--backend", "real", "--quiet", "--task", "sort", "--output", str(folder)]
    assert common.main("overlap_2gpu", arguments) == 0
    assert common.main("overlap_2gpu", [*arguments, "--demand", "all"]) == 0
    assert [given["output"] for _, given in runs] == [
        str(folder), f"{folder}-batch", f"{folder}-floor", f"{folder}-signal"
    ]  # fmt: skip
    assert all(job.workload.task == "sort" for scenario, _ in runs for job in scenario.jobs)
