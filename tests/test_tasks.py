"""Prompts and rewards: built-in tasks, prompt files, reward functions, and what a workload makes of them."""

import asyncio
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.ray_gpu import rewards
from backends.ray_gpu.prompts import PromptFile, load_prompts
from backends.ray_gpu.rewards import RewardFunction, load_reward
from backends.ray_gpu.tasks import TASKS, make_task
from backends.ray_gpu.tasks.base import Message, Prompt
from backends.ray_gpu.tasks.scoring import NEAR, closeness
from backends.ray_gpu.workload import Lessons
from core.config import Job
from core.errors import ConfigError, OperationFailed
from core.units import ns
from core.workload import TASKS as DECLARED
from core.workload import Workload
from tests.fakes import make_job

ROOT = Path(__file__).parent.parent


def refusal(call, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- built-in tasks -------------------------------------------------------------------------------------


def test_the_tasks_are_those_a_scenario_file_may_name() -> None:
    assert sorted(TASKS) == sorted(DECLARED)
    assert refusal(make_task, "sorting", 3) == "task: no task is called 'sorting'; did you mean 'sort'?"


def test_each_task_asks_for_what_its_answer_says() -> None:
    for index in range(50):
        word = make_task("copy", 5).prompt("7", index)
        assert word.text == f"{word.answer}=" and len(word.answer) == 5
        digits = make_task("sort", 6).prompt("7", index)
        assert digits.answer == "".join(sorted(digits.text[:-1])) and len(digits.answer) == 6
        total = make_task("arithmetic", 2).prompt("7", index)
        a, b = total.text[:-1].split("+")
        assert int(a) + int(b) == int(total.answer) and max(int(a), int(b)) < 100


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_prompt_depends_on_seed_and_index_alone(name: str) -> None:
    first = [make_task(name, 4).prompt("7", index) for index in range(40)]
    task = make_task(name, 4)
    assert [task.prompt("7", index) for index in reversed(range(40))] == first[::-1]
    assert len({prompt.text for prompt in first}) > 20, "they differ by index"
    assert [task.prompt("8", index) for index in range(40)] != first, "and by seed"


def test_another_process_draws_the_same_prompts() -> None:
    code = "from backends.ray_gpu.tasks import make_task; print(make_task('sort', 5).prompt('7', 3).text)"
    run = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "5"}
    printed = subprocess.run(run, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == make_task("sort", 5).prompt("7", 3).text


def test_the_draws_favour_nobody() -> None:
    letters = "".join(make_task("copy", 8).prompt("1", index).answer for index in range(500))
    counts = [letters.count(letter) for letter in "abcd"]
    assert sum(counts) == 4000 and all(880 < count < 1120 for count in counts), counts


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_right_answer_earns_one_and_every_other_less(name: str) -> None:
    task = make_task(name, 3)
    prompt = task.prompt("7", 0)
    assert task.reward(prompt, prompt.answer) == task.reward(prompt, f" {prompt.answer}\n") == 1
    for wrong in ("", prompt.answer[:-1], prompt.answer + prompt.answer[-1], prompt.answer[::-1] + "x", "The answer"):
        assert 0 <= task.reward(prompt, wrong) < 1, wrong


@given(st.text(max_size=12), st.text("abcd", min_size=1, max_size=6))
def test_closeness_is_one_for_the_answer_alone_and_never_outside_0_to_1(said: str, answer: str) -> None:
    value = closeness(said, answer, "abcd")
    assert 0 <= value <= 1
    assert (value == 1) == (said.strip() == answer)


def test_credit_grows_from_noise_over_the_right_kind_to_the_right_place() -> None:
    assert closeness("\x00\x07~", "abc", "abcd") == 0
    assert closeness("ddd", "abc", "abcd") == pytest.approx(NEAR)
    assert closeness("add", "abc", "abcd") == pytest.approx((1 + 2 * NEAR) / 3)
    assert closeness("abcdd", "abc", "abcd") == pytest.approx(3 / 5), "what is too long divides by its own length"
    assert closeness("ab", "abc", "abcd") == pytest.approx(2 / 3)


# --- prompt files ---------------------------------------------------------------------------------------


def written(folder: Path, *lines: object) -> Path:
    """A prompts file; objects as JSON, texts as they are."""
    file = folder / "p.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def test_a_prompt_file_keeps_texts_conversations_answers_and_the_rest(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    file = written(tmp_path, {"prompt": "1+1=", "answer": 2, "level": [1]}, "", {"prompt": turns})
    first, second = load_prompts(file)
    assert first.as_dict() == {"prompt": "1+1=", "answer": 2, "level": [1]}
    assert second.messages == (
        Message(role="system", content="Be brief."), Message(role="user", content="2+2?")
    )  # fmt: skip
    assert second.as_dict() == {"prompt": turns, "answer": None}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'prompt': 'x'}", "is no JSON: Expecting property name enclosed in double quotes at column 2; write one"),
        ("[1]", "must be an object, not a list"),
        ('{"prmpt": "x", "answer": 1}', "has no 'prompt'; its keys are prmpt, answer"),
        ('{"prompt": ""}', "'prompt' must be text or a list of messages, not text"),
        ('{"prompt": 3}', "'prompt' must be text or a list of messages, not a number"),
        ('{"prompt": []}', "'prompt' must be text or a list of messages, not a list"),
        ('{"prompt": [{"role": "user"}]}', "prompt[0]: must have the texts 'role' and 'content'"),
        ("[" * 100_000, "is no JSON"),
        ("1" * 5000, "is no JSON"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line_number(line: str, said: str, tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": "ok"}, "", line)
    message = refusal(load_prompts, file)
    assert message.startswith(f"{file}:3: ") and said in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(load_prompts, tmp_path / "none.jsonl") == f"{tmp_path / 'none.jsonl'}: No such file or directory"
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert refusal(load_prompts, tmp_path / "bad.jsonl").endswith("is not UTF-8 text")
    assert "has no prompts" in refusal(load_prompts, written(tmp_path, ""))


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, *({"prompt": str(i)} for i in range(20)))
    source = PromptFile(path)
    epochs = [[source.prompt("7", epoch * 20 + i).text for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PromptFile(path)
    assert [again.prompt("7", i).text for i in range(60)] == [text for epoch in epochs for text in epoch]
    assert [source.prompt("8", i).text for i in range(20)] != epochs[0]


# --- reward functions -----------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module of reward functions into a folder, under a name that is free again afterwards."""
    names: list[str] = []
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source: str) -> str:
        names.append(f"rewards_{len(names)}_{tmp_path.name.replace('-', '_')}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def judge(function, *, limit: int = ns(5)) -> float:
    async def once() -> float:
        return await RewardFunction("m:f", function, limit)({"prompt": "p", "answer": "a"}, "a")

    return asyncio.run(once())


def failure(function, *, limit: int = ns(5)) -> str:
    with pytest.raises(OperationFailed) as caught:
        judge(function, limit=limit)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_reward_function_is_found_in_the_folder_and_called_with_record_and_completion(module, tmp_path) -> None:
    name = module("def f(prompt, completion): return prompt['answer'] == completion\nasync def g(p, c): return 0.25\n")
    exact, other = (load_reward(f"{name}:{function}", ns(5), tmp_path) for function in "fg")

    async def both() -> list[float]:
        return [await exact({"answer": "x"}, "x"), await exact({"answer": "x"}, "y"), await other({}, "")]

    assert asyncio.run(both()) == [1.0, 0.0, 0.25]


def test_a_reward_function_that_cannot_be_had_is_refused_with_the_reason(module, tmp_path: Path) -> None:
    def said(name: str) -> str:
        return refusal(load_reward, name, ns(1), tmp_path)

    assert "no_such_rewards:f cannot be imported: ModuleNotFoundError: No module named" in said("no_such_rewards:f")
    assert "ZeroDivisionError: division by zero" in said(f"{module('1 / 0')}:f")
    assert "SyntaxError" in said(f"{module('def')}:f")
    name = module("x = 1\ndef f(prompt): return 1\n")
    assert said(f"{name}:g") == f"reward: the module {name} has no 'g'"
    assert said(f"{name}:x") == f"reward: {name}:x is no function"
    assert f"{name}:f(prompt) does not take (prompt, completion): too many positional arguments" in said(f"{name}:f")


def test_what_a_reward_function_does_wrong_is_the_trajectory_s_error() -> None:
    async def broken(prompt, completion):
        raise KeyError("level")

    def leaves(prompt, completion):
        raise SystemExit(3)

    def times_out(prompt, completion):
        raise TimeoutError("the judge did not answer")

    assert failure(lambda p, c: 1 / 0) == "the reward m:f raised ZeroDivisionError: division by zero"
    assert failure(broken) == "the reward m:f raised KeyError: 'level'"
    assert failure(leaves) == "the reward m:f raised SystemExit: 3"
    assert failure(times_out) == "the reward m:f raised TimeoutError: the judge did not answer"
    assert failure(lambda p, c: next(iter(()))) == "the reward m:f raised StopIteration"
    assert failure(lambda p, c: None) == "the reward m:f returned a NoneType, which is no number"
    assert failure(lambda p, c: "good") == "the reward m:f returned the text 'good', which is no number"
    assert failure(lambda p, c: math.nan) == "the reward m:f returned nan"
    assert failure(lambda p, c: -math.inf) == "the reward m:f returned -inf"


def test_a_slow_reward_fails_at_its_limit_and_holds_up_nobody() -> None:
    stop = threading.Event()

    async def sleeps(prompt, completion):
        await asyncio.sleep(60)

    async def main() -> float:
        slow = RewardFunction("m:slow", lambda p, c: stop.wait(60), ns(0.2))
        quick = RewardFunction("m:quick", lambda p, c: 1, ns(5))
        waiting = asyncio.create_task(slow({}, ""))
        began = time.monotonic()
        await quick({}, "")
        passed = time.monotonic() - began
        with pytest.raises(OperationFailed, match=r"the reward m:slow took more than 0\.2 s"):
            await waiting
        return passed

    try:
        assert asyncio.run(main()) < 0.2
        assert failure(sleeps, limit=ns(0.1)) == "the reward m:f took more than 0.1 s"
    finally:
        stop.set()


def test_a_reward_that_never_ends_stops_being_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "LEFT_BEHIND", 3)
    stop = threading.Event()
    calls = []

    def hangs(prompt, completion):
        calls.append(completion)
        stop.wait(60)

    async def main() -> list[str]:
        hung = RewardFunction("m:f", hangs, ns(0.02))
        outcomes = []
        for _ in range(5):
            with pytest.raises(OperationFailed) as caught:
                await hung({}, "")
            outcomes.append(str(caught.value))
        stop.set()
        while any(thread.is_alive() for thread in hung._late):
            await asyncio.sleep(0.001)
        with pytest.raises(OperationFailed, match="NoneType"):
            await RewardFunction("m:f", hangs, ns(5))({}, "")
        return outcomes

    outcomes = asyncio.run(main())
    assert [text.split()[3] for text in outcomes] == ["took"] * 3 + ["3"] * 2
    assert len(calls) == 4, "three before, none while they hung, one after"


def test_a_hung_reward_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text("import time\ndef f(prompt, completion): time.sleep(600)\n")
    code = (
        "import asyncio\nfrom backends.ray_gpu.rewards import load_reward\n"
        f"reward = load_reward('hang:f', 10_000_000, {str(tmp_path)!r})\n"
        "async def main():\n    await reward({}, '')\n"
        "asyncio.run(main())\n"
    )
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "took more than 0.01 s" in ended.stderr and time.monotonic() - began < 60


# --- a workload as prompts and rewards ------------------------------------------------------------------


def job(name: str = "p1", **workload: object) -> Job:
    return make_job(name, target=12, samples_per_prompt=4, workload=Workload(**workload))


def test_a_batch_has_its_own_prompts_each_asked_as_often_as_declared() -> None:
    lessons = Lessons(job(task="sort", size=9), seed=7, device="cpu")
    batches = [[lessons.prompt(batch, trajectory).text for trajectory in range(12)] for batch in range(3)]
    for texts in batches:
        assert texts == [text for text in texts[::4] for _ in range(4)]
    assert len({text for texts in batches for text in texts}) == 9, "no prompt comes twice"
    assert [lessons.group(trajectory) for trajectory in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert (lessons.group(12), lessons.prompt(1, 12)) == (0, lessons.prompt(1, 0)), "a replacement"


def test_pipelines_seeds_and_evaluations_have_different_prompts() -> None:
    def texts(name: str, seed: int, *, evaluation: bool = False) -> tuple[str, ...]:
        lessons = Lessons(job(name, task="sort", size=9), seed=seed, device="cpu")
        return tuple(lessons.prompt(0, i, evaluation=evaluation).text for i in range(0, 12, 4))

    assert texts("p1", 7) == texts("p1", 7)
    assert len({texts("p1", 7), texts("p2", 7), texts("p1", 8), texts("p1", 7, evaluation=True)}) == 4


def test_the_task_judges_unless_the_user_brings_a_reward(module, tmp_path: Path) -> None:
    name = module("def f(prompt, completion): return len(completion)\n")
    prompt = Prompt(text="ab=", answer="ab")
    own = Lessons(job(), seed=7, device="cpu")
    theirs = Lessons(job(reward=f"{name}:f"), seed=7, device="cpu", folder=tmp_path)
    assert [asyncio.run(each.reward(prompt, "abcd")) for each in (own, theirs)] == [0.5, 4.0]


def test_a_workload_that_cannot_be_had_names_its_pipeline(tmp_path: Path) -> None:
    def lessons(**workload: object) -> Lessons:
        return Lessons(job(**workload), 7, "cpu", tmp_path)

    file = written(tmp_path, {"no": 1})
    assert refusal(lambda: lessons(prompts=str(file), task="", reward="a:b")).startswith(f"p1: {file}:1: has no")
    assert refusal(lambda: lessons(reward="nowhere_at_all:f")).startswith("p1: reward: nowhere_at_all:f cannot be")


def test_a_driver_checks_a_workload_without_torch_or_transformers() -> None:
    code = (
        "import sys; import backends.ray_gpu.workload, backends.ray_gpu.models; "
        "print([name for name in ('torch', 'transformers', 'ray', 'numpy', 'huggingface_hub') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
