"""Each option of the engine has an effect; the memory plan adds up."""

import json
from pathlib import Path

import pytest
import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.config import EngineConfig
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.runtime import CpuMemory
from deepinfer_core.engine.engine import Engine, build_engine
from deepinfer_core.engine.memory import plan_memory
from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.errors import ConfigError
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.state import POOLS
from deepinfer_core.plans import StepKind, StepPlan
from deepinfer_core.types import Request

GOLDEN = Path(__file__).parents[3] / "tests" / "conformance" / "model"
FOLDER = GOLDEN / "tiny_a_fp"
SMALL = {"block_size": 4, "max_model_len": 100}


def engine(**options) -> Engine:
    config = EngineConfig(model=str(FOLDER), **{**SMALL, **options})
    return build_engine(config, CpuBackend(config.numerics), FOLDER, TextCodec(FOLDER).tokenizer)


def request(uid: int, length: int = 20, max_tokens: int = 4) -> Request:
    prompt = tuple(range(3 + uid, 3 + uid + length))
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(uid, f"r{uid}", prompt, params, seed=1)


def plans_of(target: Engine, requests: list[Request]) -> list[StepPlan]:
    """Run to the end and return what was launched."""
    launched = []
    launch = target._loop.worker.launch
    target._loop.worker.launch = lambda plan: launched.append(plan) or launch(plan)
    for each in requests:
        target.submit(each)
    while target.has_work:
        target.step()
    return launched


def test_max_step_tokens_bounds_prefill_steps():
    plans = plans_of(engine(max_step_tokens=8), [request(0), request(1)])
    sizes = [plan.output.num_rows for plan in plans if plan.output.kind is StepKind.PREFILL]
    assert sizes == [8, 8, 8, 8, 8]
    whole = plans_of(engine(max_step_tokens=64), [request(0), request(1)])
    assert [plan.output.num_rows for plan in whole][:1] == [40]


@pytest.mark.parametrize("longest", [1, 3])
def test_prefill_run_max_bounds_prefill_steps_in_a_row_while_others_decode(longest):
    # the first prompt decodes while the second, longer one is still read
    requests = [request(0, 4, max_tokens=20), request(1, 60)]
    plans = plans_of(engine(max_step_tokens=6, prefill_run_max=longest), requests)
    kinds = [plan.output.kind for plan in plans]
    first = kinds.index(StepKind.DECODE)
    runs = "".join("p" if kind is StepKind.PREFILL else "d" for kind in kinds[first:]).split("d")
    assert max(map(len, runs)) == longest


def test_max_sequences_bounds_the_batch():
    plans = plans_of(engine(max_sequences=2), [request(uid) for uid in range(5)])
    assert max(len(plan.sequences) for plan in plans) == 2


def test_num_blocks_and_cache_memory_set_the_pools():
    assert engine(num_blocks=11).memory.sizes.num_blocks == dict.fromkeys(POOLS, 11)
    config = ModelConfig.from_folder(FOLDER)
    for gib in (1e-4, 2e-4):
        options = EngineConfig(cache_memory_gib=gib, max_sequences=64, block_size=4)
        plan = plan_memory(config, options, CpuBackend("release"))
        spent = plan.sizes.num_blocks["index"] * sum(plan.block_bytes.values())
        assert spent <= gib * 2**30 < spent + sum(plan.block_bytes.values())


def test_caches_that_hold_nothing_are_an_error():
    options = EngineConfig(cache_memory_gib=1e-7)
    plan = plan_memory(ModelConfig.from_folder(FOLDER), options, CpuBackend("release"))
    words = "`cache_memory_gib` is 1e-07, but a block of 64 tokens"
    with pytest.raises(ConfigError, match=words):
        plan.check()
    assert plan.table()[-1][:2] == ("fits", "no")
    with pytest.raises(ConfigError, match=words):
        engine(block_size=64, cache_memory_gib=1e-7)


def test_a_plan_that_does_not_fit_says_what_is_in_the_way(monkeypatch):
    released = json.loads((GOLDEN / "released_config.json").read_text())
    backend = CpuBackend("release")
    monkeypatch.setattr(backend.runtime, "memory", lambda: CpuMemory(64 * 2**30, 22 * 2**30))
    plan = plan_memory(ModelConfig.from_dict(released), EngineConfig(), backend)
    fits, verdict, why = plan.table()[-1]
    assert (fits, verdict) == ("fits", "no")
    assert "278.12 GiB of weights" in why and "0 B of 22.00 GiB" in why
    for options in ({"num_blocks": 10}, {"num_blocks": 10**22}, {"cache_memory_gib": 1e300}):
        plan = plan_memory(ModelConfig.from_dict(released), EngineConfig(**options), backend)
        with pytest.raises(ConfigError, match=f"`{next(iter(options))}` is .*leave 0 B"):
            plan.check()


def test_stored_windows_that_do_not_fit_are_named():
    words = "lower `max_sequences`, which is 16, or `stored_windows`, which is 1000000000"
    with pytest.raises(ConfigError, match=words):
        engine(stored_windows=10**9)


def test_blocks_beyond_the_memory_are_refused_before_anything_is_allocated():
    with pytest.raises(ConfigError, match=r"`num_blocks` is 100000000000:.*of blocks"):
        engine(num_blocks=10**11)


def test_num_threads_is_one_for_small_models_unless_set():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        engine()
        assert torch.get_num_threads() == 1
        engine(num_threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_block_size_sets_the_blocks_and_not_the_result():
    results = []
    for size in (2, 4, 64):
        plans = plans_of(target := engine(block_size=size, determinism="strict"), [request(0)])
        assert target.memory.sizes.block_size == size
        results.append(len(plans))
        needed = -(-20 // size)
        assert len(plans[0].sequences[0].blocks[0].block_ids) == needed
    assert len(set(results)) == 1


def test_max_model_len_ends_a_request():
    with LLM(FOLDER, accelerator="cpu", max_model_len=30) as llm:
        output = llm.generate([[5] * 20], SamplingParams(max_tokens=99, ignore_eos=True))[0]
    assert len(output.token_ids) == 10
    assert output.finish_reason == "length"


def test_a_context_beyond_the_models_is_an_error():
    with pytest.raises(ConfigError, match="`max_model_len` is 5000 tokens, but the model's"):
        engine(max_model_len=5000)


def test_engine_seed_changes_text_and_request_seed_fixes_it():
    def text(engine_seed: int, **params) -> list[tuple[int, ...]]:
        with LLM(FOLDER, accelerator="cpu", seed=engine_seed) as llm:
            outputs = llm.generate([[7, 8, 9]] * 2, SamplingParams(max_tokens=12, **params))
            return [output.token_ids for output in outputs]

    assert text(0) == text(0)
    assert text(0) != text(1)
    assert len({*text(0)}) == 2, "two requests without a seed differ"
    assert text(0, seed=5) == text(1, seed=5)
    assert len({*text(0, seed=5)}) == 1


def test_determinism_is_the_default_of_requests_and_is_reported():
    for mode, replay in (("strict", "off"), ("normal", "decoder")):
        with LLM(FOLDER, accelerator="cpu", determinism=mode, **SMALL) as llm:
            outputs = llm.generate([[5] * 40], SamplingParams(max_tokens=2))
            assert (outputs[0].determinism, outputs[0].bounded_replay) == (mode, replay)
            plans = plans_of(llm.engine, [])
            assert plans == []


def test_numerics_changes_results():
    logprobs = set()
    for numerics in ("ideal", "cache", "release"):
        with LLM(FOLDER, accelerator="cpu", numerics=numerics, **SMALL) as llm:
            params = SamplingParams(max_tokens=1, temperature=0, logprobs=0)
            logprobs.add(llm.generate([[5, 6, 7] * 12], params)[0].logprobs[0].logprob)
    assert len(logprobs) == 3


def test_released_geometry_costs_890_bytes_a_token():
    released = json.loads((GOLDEN / "released_config.json").read_text())
    config = ModelConfig.from_dict(released)
    options = EngineConfig(num_blocks=4, max_sequences=8)
    plan = plan_memory(config, options, CpuBackend("release"), weights_loaded=True)
    assert plan.bytes_per_token == 890
    assert plan.entry_bytes == {"compressed": 720, "index": 170}
    assert plan.block_bytes == {"compressed": 720 * 64, "index": 170 * 64}
    assert plan.slot_bytes["window rings"] == 40 * 128 * 528
    assert plan.slot_bytes["compressor carry"] == 3 * 2 * 2 * 512 * 4
    # 510,286,023,000 bytes in all, less the drafter, the tower and what stays in files
    assert plan.mapped == (384006168 + 384016682) * 264
    assert 290e9 < plan.weights < 310e9
    assert ("block KV per token", "890 B", "both pools, all sources") in plan.table()


def test_plan_is_what_is_allocated():
    target = engine(num_blocks=7, max_sequences=3)
    state, plan = target._loop.worker.state, target.memory
    entries = sum(
        source.data.nbytes for sources in state.blocks.values() for source in sources.values()
    )
    assert entries == plan.cache_bytes
    rings = sum(ring.data.nbytes for ring in state.windows)
    carry = sum(each.data.nbytes for each in state.carried.values())
    tables = sum(table.nbytes for table in state.tables.values())
    assert rings + carry + tables + state.history.nbytes == plan.state_bytes
