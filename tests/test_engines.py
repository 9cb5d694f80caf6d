"""The engine that runs without a GPU, held to the rules of `engines.base`; log-probs against plain forward passes."""

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.ray_gpu.devices.slots import Slots
from backends.ray_gpu.engines.base import TAGS, EngineConfig, GenerateRequest, GenerateResult
from core.errors import ConfigError, OperationFailed, OutOfMemory

torch = pytest.importorskip("torch", reason="the CPU engine needs torch")
transformers = pytest.importorskip("transformers", reason="the CPU engine needs transformers")

from backends.ray_gpu.engines.hf import HFEngine  # noqa: E402
from backends.ray_gpu.engines.hf_sampling import choose, draw, nucleus  # noqa: E402
from backends.ray_gpu.weights.manifest import Manifest  # noqa: E402
from backends.ray_gpu.weights.reader import fingerprint  # noqa: E402
from backends.ray_gpu.weights.writer import WeightWriter  # noqa: E402

VOCABULARY = 97
LAYERS, KV_HEADS, HEAD = 2, 2, 8
KV_TOKENS = 400
KV_BYTES = KV_TOKENS * LAYERS * 2 * KV_HEADS * HEAD * 4
LONGEST = 256
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": LONGEST,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
PROMPTS = [(5, 6, 7), (11,), (20, 21, 22, 23, 24, 25, 26, 27), (40, 41), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)]


def new_model(kind: str, seed: int, tied: bool = False):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=tied)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(new_model("Llama", 0), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tied_qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(new_model("Qwen2", 1, tied=True), tmp_path_factory.mktemp("qwen"))


def saved(model, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def config(model: str, **changes) -> EngineConfig:
    return EngineConfig(**{"model": model, "kv_tokens": KV_TOKENS, "max_running": 8} | changes)


@asynccontextmanager
async def running(model: str, hold=lambda tag, nbytes: None, **changes) -> AsyncIterator[HFEngine]:
    engine = HFEngine(config(model, **changes), hold)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test within a limit, so that an engine that hangs is a failure."""

    async def limited(**fixtures) -> None:
        async with asyncio.timeout(60):
            await test(**fixtures)

    def wrapped(**fixtures) -> None:
        asyncio.run(limited(**fixtures))

    wrapped.__signature__ = inspect.signature(test)  # pytest reads the fixtures from it
    wrapped.__name__ = test.__name__
    return wrapped


def asked(prompt: tuple[int, ...] = PROMPTS[0], tokens: int = 12, **changes) -> GenerateRequest:
    return GenerateRequest(**{"id": "r", "input_ids": prompt, "max_new_tokens": tokens, "temperature": 0.0} | changes)


def by_forward(model, request: GenerateRequest, result: GenerateResult) -> list[float]:
    """Log-probs of the result's tokens from one pass over the whole sequence, without any cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.input_ids, *result.token_ids]])).logits[0].float()
    logprobs = torch.log_softmax(logits / (request.temperature or 1.0), dim=-1)
    at = len(request.input_ids) - 1
    return [logprobs[at + index, token].item() for index, token in enumerate(result.token_ids)]


def loaded(folder: str):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def publish(model, directory: Path, version: int, without: str = "", **replaced) -> Manifest:
    with WeightWriter(directory, "p1", version, 16_000) as writer:
        for name, parameter in model.named_parameters():
            if name != without:
                writer.add(name, replaced.get(name.replace(".", "_"), parameter))
        return writer.commit()


# --- what is generated ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "tied_qwen"])
@on_a_loop
async def test_logprobs_are_those_of_a_full_forward_pass(request, family: str, temperature: float) -> None:
    folder = request.getfixturevalue(family)
    model = loaded(folder)
    requests = [asked(prompt, 10 + 5 * n, temperature=temperature, seed=n) for n, prompt in enumerate(PROMPTS)]
    async with running(folder) as engine:
        results = await asyncio.gather(*map(engine.generate, requests))
    for one, result in zip(requests, results, strict=True):
        assert (result.status, len(result.token_ids)) == ("completed", one.max_new_tokens)
        assert result.logprobs == pytest.approx(by_forward(model, one, result), abs=1e-4)


@on_a_loop
async def test_greedy_tokens_are_the_most_probable_ones(llama: str) -> None:
    model = loaded(llama)
    async with running(llama) as engine:
        result = await engine.generate(asked(tokens=30))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPTS[0], *result.token_ids]])).logits[0]
    assert logits.argmax(-1).tolist()[len(PROMPTS[0]) - 1 : -1] == list(result.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@on_a_loop
async def test_resuming_from_a_prefix_equals_one_go(llama: str, temperature: float) -> None:
    async with running(llama) as engine:
        whole = await engine.generate(asked(tokens=24, temperature=temperature, seed=3))
        start = await engine.generate(asked(tokens=10, temperature=temperature, seed=3))
        prefix = (*PROMPTS[0], *start.token_ids)
        rest = await engine.generate(asked(prefix, tokens=14, temperature=temperature, seed=3))
    assert start.token_ids + rest.token_ids == whole.token_ids
    assert start.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


@on_a_loop
async def test_a_result_does_not_depend_on_what_else_is_in_the_batch(llama: str) -> None:
    requests = [asked(PROMPTS[n % 5], 4 + 2 * n, temperature=1.0, seed=n) for n in range(9)]
    async with running(llama, max_running=1) as engine:
        alone = [await engine.generate(request) for request in requests]
    async with running(llama, max_running=5) as engine:
        together = await asyncio.gather(*map(engine.generate, requests))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@on_a_loop
async def test_seeds_tell_requests_apart(llama: str) -> None:
    async with running(llama) as engine:
        ends = await asyncio.gather(*(engine.generate(asked(temperature=1.0, seed=seed)) for seed in (1, 2, 1)))
    assert ends[0].token_ids == ends[2].token_ids != ends[1].token_ids


@on_a_loop
async def test_a_stop_token_ends_a_request_and_is_part_of_it(llama: str) -> None:
    async with running(llama) as engine:
        free = await engine.generate(asked(tokens=20))
        stop = free.token_ids[6]
        stopped = await engine.generate(asked(tokens=20, stop_ids=(stop,)))
    assert stopped.status == "completed"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


@on_a_loop
async def test_no_tokens_wanted_is_complete_at_once(llama: str) -> None:
    async with running(llama) as engine:
        assert await engine.generate(asked(tokens=0)) == GenerateResult(status="completed")


def test_draws_are_uniform_and_keyed() -> None:
    draws = [draw(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(draws)) == 2000
    assert 0 < min(draws) < max(draws) < 1
    assert sum(draws) / 2000 == pytest.approx(0.5, abs=4 / math.sqrt(12 * 2000))


def test_tokens_come_as_often_as_they_are_probable() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 4000
    requests = [asked(temperature=1.0, seed=seed) for seed in range(count)]
    tokens, logprobs = choose(probabilities.log().expand(count, 4), requests, [3] * count)
    for token, probability in enumerate(probabilities.tolist()):
        deviation = math.sqrt(probability * (1 - probability) / count)
        assert tokens.count(token) / count == pytest.approx(probability, abs=4 * deviation)
    assert logprobs[0] == pytest.approx(probabilities[tokens[0]].log().item(), abs=1e-6)


def test_top_p_leaves_the_fewest_tokens_that_have_so_much_and_the_logprobs_as_they_are() -> None:
    probabilities = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    for top_p, kept in [(0.4, {1}), (0.5, {1}), (0.51, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})]:
        assert set(nucleus(probabilities.clone(), torch.tensor([top_p]))[0].nonzero().flatten().tolist()) == kept
    requests = [asked(temperature=1.0, top_p=0.7, seed=seed) for seed in range(300)]
    tokens, logprobs = choose(probabilities.log().expand(300, 4), requests, [0] * 300)
    assert set(tokens) == {1, 3}
    assert logprobs == pytest.approx([probabilities[0, token].log().item() for token in tokens], abs=1e-6)


def test_a_temperature_sharpens_the_distribution_that_logprobs_speak_of() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    (token,), (logprob,) = choose(logits, [asked(temperature=0.5, seed=1)], [0])
    assert logprob == pytest.approx(torch.log_softmax(logits * 2, -1)[0, token].item(), abs=1e-6)


# --- room -------------------------------------------------------------------------------------------------


@on_a_loop
async def test_requests_queue_while_the_pool_is_full(llama: str) -> None:
    """Each may need 20 of 50 tokens: two run at once, and the others have their turn."""
    requests = [asked(PROMPTS[n % 5], 20 - len(PROMPTS[n % 5]), temperature=1.0, seed=n) for n in range(5)]
    async with running(llama, kv_tokens=50) as engine:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert 1 <= len(done) <= 2
        assert [result.status for result in await asyncio.gather(*tasks)] == ["completed"] * 5
        alone = [await engine.generate(request) for request in requests]
    assert [task.result().token_ids for task in tasks] == [result.token_ids for result in alone]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids": (1,) * 200, "max_new_tokens": 201}, "401 tokens in all are more than the 256"),
        ({"input_ids": ()}, "the prompt is empty"),
        ({"input_ids": (3, VOCABULARY)}, "outside the vocabulary of 97"),
        ({"input_ids": (-1,)}, "outside the vocabulary of 97"),
        ({"temperature": -1.0}, r"temperature -1.0"),
        ({"temperature": math.nan}, r"temperature nan"),
        ({"top_p": 0.0}, r"top_p 0.0"),
    ],
    ids=["too long", "empty", "token too large", "token below 0", "cold", "no number", "no mass"],
)
@on_a_loop
async def test_a_request_that_makes_no_sense_fails_alone_with_a_reason(llama: str, changes: dict, reason: str) -> None:
    async with running(llama) as engine:
        bad, good = await asyncio.gather(engine.generate(asked(**changes)), engine.generate(asked()))
    assert (bad.status, bad.token_ids, good.status) == ("failed", (), "completed")
    assert reason in bad.reason


@on_a_loop
async def test_a_request_that_never_fits_into_the_pool_fails(llama: str) -> None:
    async with running(llama, kv_tokens=40) as engine:
        assert (await engine.generate(asked(tokens=37))).status == "completed"
        result = await engine.generate(asked(tokens=38))
    assert (result.status, result.reason) == ("failed", "41 tokens in all never fit into a KV pool of 40")


@on_a_loop
async def test_a_model_that_went_astray_fails_its_requests_and_leaves_no_trace(llama: str, tmp_path: Path) -> None:
    model = loaded(llama)
    bad = model.model.norm.weight.detach().clone()
    bad[3] = math.nan
    async with running(llama) as engine:
        before = await engine.generate(asked())
        await engine.update_weights(publish(model, tmp_path, 1, model_norm_weight=bad), 1, verify=True)
        results = await asyncio.gather(*(engine.generate(asked(prompt)) for prompt in PROMPTS))
        assert {(r.status, r.reason) for r in results} == {("failed", "the model's logits are not finite")}
        await engine.update_weights(publish(model, tmp_path, 2), 2, verify=True)
        assert await engine.generate(asked()) == before


@on_a_loop
async def test_an_error_of_the_model_fails_those_that_run_and_nobody_after(llama: str, monkeypatch) -> None:
    async with running(llama) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(engine._model, "decode", lambda *_: 1 / 0)
            results = await asyncio.gather(engine.generate(asked()), engine.generate(asked()))
        assert {(r.status, r.reason) for r in results} == {("failed", "ZeroDivisionError: division by zero")}
        assert (await engine.generate(asked())).status == "completed"


# --- ending early -----------------------------------------------------------------------------------------


async def under_way(engine: HFEngine) -> None:
    """Until what was asked for has its first tokens."""
    while not all(ticket.tokens for ticket in engine._in_flight):
        await asyncio.sleep(0.001)


@on_a_loop
async def test_an_abort_brings_back_what_there_is_with_its_logprobs(llama: str) -> None:
    model = loaded(llama)
    requests = [asked(prompt, 240, temperature=1.0, seed=n) for n, prompt in enumerate(PROMPTS)]
    async with running(llama, kv_tokens=2000) as engine:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await under_way(engine)
        await engine.abort()
        results = await asyncio.gather(*tasks)
        await engine.sleep()
    for request, result in zip(requests, results, strict=True):
        assert result.status == "aborted"
        assert 0 < len(result.token_ids) < 240
        assert result.logprobs == pytest.approx(by_forward(model, request, result), abs=1e-4)


@on_a_loop
async def test_an_abort_reaches_those_that_queue_and_holds_new_ones_back(llama: str) -> None:
    async with running(llama, max_running=1) as engine:
        tasks = [asyncio.create_task(engine.generate(asked(tokens=240))) for _ in range(3)]
        await asyncio.sleep(0)
        aborting = asyncio.create_task(engine.abort())
        await asyncio.sleep(0)
        late = await engine.generate(asked())
        assert (late.status, late.reason) == ("aborted", "the engine is being emptied")
        await aborting
        assert [result.status for result in await asyncio.gather(*tasks)] == ["aborted"] * 3
        assert (await engine.generate(asked())).status == "completed"


@on_a_loop
async def test_a_cancelled_request_leaves_the_engine_and_the_others_alone(llama: str) -> None:
    async with running(llama, kv_tokens=2000) as engine:
        expected = await engine.generate(asked(tokens=100))
        doomed = asyncio.create_task(engine.generate(asked(PROMPTS[2], tokens=240)))
        other = asyncio.create_task(engine.generate(asked(tokens=100)))
        await asyncio.sleep(0)
        await under_way(engine)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert await other == GenerateResult(
            status="completed", token_ids=expected.token_ids, logprobs=pytest.approx(expected.logprobs, abs=1e-4)
        )
        assert not engine._in_flight


@on_a_loop
async def test_a_drain_lets_requests_finish(llama: str) -> None:
    async with running(llama) as engine:
        task = asyncio.create_task(engine.generate(asked(tokens=60)))
        await asyncio.sleep(0)
        await engine.drain(30)
        assert task.result().status == "completed"


@on_a_loop
async def test_a_drain_that_lasts_too_long_aborts(llama: str) -> None:
    async with running(llama) as engine:
        task = asyncio.create_task(engine.generate(asked(tokens=240)))
        await asyncio.sleep(0)
        await under_way(engine)
        await engine.drain(0.001)
        assert task.result().status == "aborted"
        assert 0 < len(task.result().token_ids) < 240


@on_a_loop
async def test_what_is_asked_of_a_closed_engine_fails_and_what_runs_is_aborted(llama: str) -> None:
    engine = HFEngine(config(llama))
    assert (await engine.generate(asked())).reason == "the engine does not run"
    await engine.start()
    task = asyncio.create_task(engine.generate(asked(tokens=240)))
    await asyncio.sleep(0)
    await engine.close()
    assert task.result().status == "aborted"
    assert (await engine.generate(asked())).reason == "the engine does not run"
    assert set(engine.resident_bytes().values()) == {0}
    await engine.close()


# --- memory -----------------------------------------------------------------------------------------------


def weight_bytes(folder: str) -> int:
    return sum(parameter.numel() * 4 for parameter in loaded(folder).parameters())


@pytest.mark.parametrize("family", ["llama", "tied_qwen"])
@on_a_loop
async def test_resident_bytes_are_those_of_the_tensors_that_exist(request, family: str) -> None:
    folder = request.getfixturevalue(family)
    awake = {"weights": weight_bytes(folder), "kv_cache": KV_BYTES, "graphs": 0}
    async with running(folder) as engine:
        residue = {"residue": sum(buffer.nbytes for buffer in loaded(folder).buffers())}
        assert engine.resident_bytes() == awake | residue
        await engine.sleep(("kv_cache",))
        assert engine.resident_bytes() == awake | residue | {"kv_cache": 0}
        await engine.sleep()
        assert engine.resident_bytes() == {"weights": 0, "kv_cache": 0, "graphs": 0} | residue
        await engine.wake()
        assert engine.resident_bytes() == awake | residue


def anonymous_bytes() -> int:
    """Memory of this process that is backed by no file (proc(5), `RssAnon`)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@on_a_loop
async def test_sleeping_gives_the_memory_back_to_the_system(llama: str) -> None:
    tokens = 250_000
    nbytes = tokens * KV_BYTES // KV_TOKENS
    async with running(llama, kv_tokens=tokens) as engine:
        engine._pool._tensor.fill_(1.0)
        awake = anonymous_bytes()
        await engine.sleep()
        assert awake - anonymous_bytes() > 0.9 * nbytes


@on_a_loop
async def test_every_byte_is_announced_before_it_is_taken_and_given_back(llama: str) -> None:
    held: dict[str, int] = {}
    engine = HFEngine(config(llama), held.__setitem__)
    await engine.start()
    assert held == {tag: nbytes for tag, nbytes in engine.resident_bytes().items() if tag != "graphs"}
    await engine.sleep()
    assert held == {"weights": 0, "kv_cache": 0, "residue": engine.resident_bytes()["residue"]}
    await engine.wake(("weights",))
    assert (held["weights"], held["kv_cache"]) == (weight_bytes(llama), 0)
    await engine.close()
    assert set(held.values()) == {0}


@on_a_loop
async def test_a_wake_beyond_the_budget_is_refused_with_the_sums_and_changes_nothing(
    llama: str, tmp_path: Path
) -> None:
    weights = weight_bytes(llama)
    budget = weights + KV_BYTES + 100
    slots = Slots(tmp_path, {0: budget})
    async with running(llama, lambda tag, nbytes: slots.hold(0, "p1/0", nbytes, tag)) as engine:
        residue = engine.resident_bytes()["residue"]
        await engine.sleep()
        assert slots.free(0) == budget - residue
        slots.hold(0, "p2/0", KV_BYTES, "kv_cache")
        free = budget - residue - KV_BYTES - weights
        with pytest.raises(
            OutOfMemory,
            match=rf"GPU 0: p1/0 \(kv_cache\) needs {KV_BYTES} bytes, and {free} of {budget} are free.*p2/0",
        ):
            await engine.wake()
        assert engine.resident_bytes() == {"weights": 0, "kv_cache": 0, "graphs": 0, "residue": residue}
        assert slots.free(0) == budget - residue - KV_BYTES
        assert (await engine.generate(asked())).reason == "the engine's weights, kv_cache, graphs sleep"
        slots.drop(0, "p2/0")
        await engine.wake()
    assert slots.free(0) == budget


@on_a_loop
async def test_a_start_beyond_the_budget_is_refused_and_leaves_nothing(llama: str, tmp_path: Path) -> None:
    slots = Slots(tmp_path, {0: weight_bytes(llama)})
    engine = HFEngine(config(llama), lambda tag, nbytes: slots.hold(0, "p1/0", nbytes, tag))
    with pytest.raises(OutOfMemory, match=r"p1/0 \(weights\) needs"):
        await engine.start()
    assert slots.holders(0) == []
    assert set(engine.resident_bytes().values()) == {0}


@on_a_loop
async def test_nobody_sleeps_or_syncs_with_requests_in_flight(llama: str, tmp_path: Path) -> None:
    manifest = publish(loaded(llama), tmp_path, 1)
    async with running(llama) as engine:
        task = asyncio.create_task(engine.generate(asked(tokens=200)))
        await asyncio.sleep(0)
        with pytest.raises(OperationFailed, match="cannot sleep with 1 requests in flight"):
            await engine.sleep()
        with pytest.raises(OperationFailed, match="cannot load weights with 1 requests in flight"):
            await engine.update_weights(manifest, 1, verify=False)
        assert (await task).status == "completed"


@on_a_loop
async def test_control_before_the_start_and_of_unknown_tags_is_refused(llama: str) -> None:
    with pytest.raises(OperationFailed, match="the engine does not run"):
        await HFEngine(config(llama)).wake()
    async with running(llama) as engine:
        with pytest.raises(OperationFailed, match="an engine has no brain"):
            await engine.sleep(("brain",))
        with pytest.raises(OperationFailed, match="started already"):
            await engine.start()


# --- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@on_a_loop
async def test_asleep_awake_and_synced_it_generates_what_the_new_weights_say(
    llama: str, tied_qwen: str, tmp_path: Path, kind: str
) -> None:
    trained = new_model(kind, 9, tied=kind == "Qwen2")
    manifest = publish(trained, tmp_path, 4)
    async with running(llama if kind == "Llama" else tied_qwen) as engine:
        assert engine.version == -1
        old = await engine.generate(asked(tokens=20))
        await engine.sleep()
        await engine.wake(("weights", "graphs"))
        assert (await engine.generate(asked())).reason == "the engine's kv_cache sleep"
        await engine.update_weights(manifest, 4, verify=True)
        await engine.wake()
        assert engine.version == 4
        new = await engine.generate(asked(tokens=20))
        assert await engine.fingerprint() == fingerprint(manifest)
        await engine.sleep(("weights",))
        assert engine.version == -1
        with pytest.raises(OperationFailed, match="sleeping weights have no fingerprint"):
            await engine.fingerprint()
    assert new.token_ids != old.token_ids
    assert new.logprobs == pytest.approx(by_forward(trained, asked(tokens=20), new), abs=1e-4)


@on_a_loop
async def test_woken_weights_serve_nobody_before_they_are_loaded(llama: str, tmp_path: Path) -> None:
    async with running(llama) as engine:
        await engine.sleep()
        with pytest.raises(OperationFailed, match="cannot load weights while they sleep"):
            await engine.update_weights(publish(loaded(llama), tmp_path, 1), 1, verify=False)
        await engine.wake()
        result = await engine.generate(asked())
        assert (result.status, result.reason.partition(":")[0]) == ("failed", "the engine has no weights")


@on_a_loop
async def test_after_a_failed_sync_the_version_stays_below_zero_until_it_is_tried_again(
    llama: str, tmp_path: Path
) -> None:
    model = loaded(llama)
    async with running(llama) as engine:
        before = await engine.generate(asked())
        await engine.update_weights(publish(model, tmp_path, 1), 1, verify=False)
        manifest = publish(model, tmp_path, 2)
        file = Path(manifest.buckets[1].file)
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(OperationFailed, match=r"v2/1\.bucket is damaged: its checksum is"):
            await engine.update_weights(manifest, 2, verify=False)
        assert engine.version == -1
        assert (await engine.generate(asked())).status == "failed"
        file.write_bytes(good)
        await engine.update_weights(manifest, 2, verify=False)
        assert engine.version == 2
        assert await engine.generate(asked()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": "model.norm.weight"}, "version 1 of p1 lacks model.norm.weight"),
        (
            {"model_norm_weight": torch.ones(31)},
            r"model.norm.weight of version 1 of p1 has the shape \[31\], not \[32\]",
        ),
    ],
    ids=["missing", "shape"],
)
@on_a_loop
async def test_weights_of_another_model_are_refused_by_name(
    llama: str, tmp_path: Path, change: dict, message: str
) -> None:
    async with running(llama) as engine:
        with pytest.raises(OperationFailed, match=message):
            await engine.update_weights(publish(loaded(llama), tmp_path, 1, **change), 1, verify=False)
        assert engine.version == -1


@on_a_loop
async def test_a_parameter_the_model_has_not_and_a_version_not_meant_are_refused(
    llama: str, tied_qwen: str, tmp_path: Path
) -> None:
    manifest = publish(loaded(tied_qwen), tmp_path, 1)
    async with running(llama) as engine:
        with pytest.raises(OperationFailed, match=r"version 1 of p1 has model.layers.0.self_attn.q_proj.bias, which"):
            await engine.update_weights(manifest, 1, verify=False)
        with pytest.raises(OperationFailed, match="version 2 was to be loaded, and the manifest is of version 1 of p1"):
            await engine.update_weights(manifest, 2, verify=False)


@on_a_loop
async def test_verifying_names_the_tensor_that_was_not_loaded_as_published(llama: str, tmp_path: Path) -> None:
    """Published in another dtype: loading rounds, which only a comparison can tell."""
    model = loaded(llama)
    wide = model.model.norm.weight.detach().double() + 1e-12
    manifest = publish(model, tmp_path, 1, model_norm_weight=wide)
    async with running(llama) as engine:
        await engine.update_weights(manifest, 1, verify=False)
        with pytest.raises(
            OperationFailed, match=r"model.norm.weight differs from version 1 of p1: float32 \[32\], not"
        ):
            await engine.update_weights(manifest, 1, verify=True)
        assert engine.version == -1


@on_a_loop
async def test_a_bfloat16_engine_takes_half_the_bytes_and_agrees_roughly(llama: str) -> None:
    async with running(llama) as engine, running(llama, dtype="bfloat16") as half:
        full = await engine.generate(asked(tokens=1))
        rough = await half.generate(asked(tokens=1))
        assert half.resident_bytes()["weights"] * 2 == engine.resident_bytes()["weights"]
        assert half.resident_bytes()["kv_cache"] * 2 == KV_BYTES
    assert rough.logprobs == pytest.approx(full.logprobs, abs=0.2)


# --- what cannot be run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "runs on the CPU, with tp 1; use SGLang on GPUs"),
        ({"tp": 2}, "runs on the CPU, with tp 1; use SGLang on GPUs"),
        ({"kv_tokens": 0}, "kv_tokens and max_running must be at least 1"),
    ],
    ids=["cuda", "tp", "no pool"],
)
def test_an_engine_that_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HFEngine(config("anything", **changes))


@on_a_loop
async def test_a_folder_without_a_model_or_with_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model is here"):
        await HFEngine(config(str(tmp_path))).start()
    sliding = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    sliding.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="this model has sliding_attention"):
        await HFEngine(config(str(tmp_path))).start()


@on_a_loop
async def test_nothing_is_printed_or_logged(llama: str, capfd, caplog) -> None:
    async with running(llama) as engine:
        await engine.generate(asked())
    assert (*capfd.readouterr(), caplog.records) == ("", "", [])


def test_the_engine_has_the_whole_interface() -> None:
    from backends.ray_gpu.engines.base import Engine

    wanted = {name for name in vars(Engine) if not name.startswith("_")}
    assert wanted - set(dir(HFEngine)) == set()
    assert TAGS == ("weights", "kv_cache", "graphs")
