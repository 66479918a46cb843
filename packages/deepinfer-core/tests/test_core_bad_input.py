"""What must not take others down: NaN weights, a failing device, requests that can never fit."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.bench.make_checkpoint import second_geometry_config, write_checkpoint
from deepinfer_core.engine import step_ring
from deepinfer_core.errors import (
    CheckpointError,
    ConfigError,
    DuplicateRequest,
    KernelInputError,
    RequestError,
)
from deepinfer_core.scheduler import settlement
from deepinfer_core.types import FinishReason

FOLDER = Path(__file__).parents[3] / "tests" / "conformance" / "model" / "tiny_a_fp"
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SMALL = {"accelerator": "cpu", "block_size": 4, "max_model_len": 100}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Path:
    """A model in which the embedding of token 77 is NaN."""
    folder = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    weights["embed.weight"][77] = math.nan
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("numerics", ["ideal", "cache", "release"])
@pytest.mark.parametrize("determinism", ["strict", "normal"])
def test_nan_ends_its_own_request_alone(poisoned, numerics, determinism):
    prompts = [[5, 6, 7] * 9, [5, 77, 9] * 9, [9, 8, 7] * 9]
    options = {**SMALL, "numerics": numerics, "determinism": determinism}
    with LLM(FOLDER, **options) as llm:
        wanted = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in (prompts[0], prompts[2])]
    with LLM(poisoned, **options, max_sequences=2, num_blocks=30) as llm:
        first, bad, last = llm.generate(prompts, GREEDY)
        assert bad.finish_reason is FinishReason.ERROR
        assert "finite" in bad.error and bad.error_code == "non_finite"
        if determinism == "strict":
            assert [first.token_ids, last.token_ids] == wanted
        assert first.finish_reason is last.finish_reason is FinishReason.LENGTH
        # what it left behind in slot and blocks does not reach those who use them next
        again = llm.generate([prompts[0], prompts[2]] * 3, GREEDY)
        assert {output.finish_reason for output in again} == {FinishReason.LENGTH}
        llm.engine.audit()
        assert not any(
            count
            for pool in llm.engine.counts.blocks.values()
            for state, count in pool.items()
            if state not in ("free", "shared")
        )


def failing_at(llm: LLM, call: int, error: BaseException) -> None:
    """Make one forward pass of the engine raise."""
    model, calls = llm.engine._loop.worker.model, []
    forward = model.forward

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error
        return forward(*args, **kwargs)

    model.forward = fail


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError, KernelInputError])
def test_a_device_fault_ends_the_requests_of_its_step_and_not_the_engine(kind):
    with LLM(FOLDER, **SMALL, max_sequences=2) as llm:
        failing_at(llm, 3, kind("out of memory: tried to allocate 7.3 GiB"))
        outputs = llm.generate([[5, 6, 7], [8, 9], [10, 11, 12]], GREEDY)
        assert [o.finish_reason.value for o in outputs] == ["error", "error", "length"]
        assert "7.3 GiB" in outputs[0].error
        assert outputs[0].error_code == "device_fault"
        llm.engine.audit()
        assert llm.generate([5, 6, 7], GREEDY)[0].finish_reason is FinishReason.LENGTH


def once(error: BaseException, inner):
    """Return `inner`, raising at its second call."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return inner(*args, **kwargs)

    return call


@pytest.mark.parametrize("error", [AssertionError("a fault of ours"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["plan", "launch", "forward", "result", "settle", "row"])
def test_an_exception_anywhere_in_a_step_leaves_the_engine_usable(monkeypatch, place, error):
    """Every open request ends once, slots and blocks come back, and the next request runs."""
    with LLM(FOLDER, **SMALL, max_sequences=2) as llm:
        engine = llm.engine
        target, name = {
            "plan": (engine._scheduler, "plan"),
            "launch": (engine._loop.worker, "launch"),
            "forward": (engine._loop.worker.model, "forward"),
            "result": (step_ring.WorkerStepState, "result"),
            "settle": (engine._scheduler, "settle"),
            "row": (settlement, "_conclude"),
        }[place]
        monkeypatch.setattr(target, name, once(error, getattr(target, name)))
        with pytest.raises(type(error)):
            llm.generate([[5, 6, 7], [8, 9], [10, 11]], GREEDY)
        engine.audit()
        assert not engine._scheduler._steps and not engine._loop.num_unsettled
        outputs = llm.generate([[5, 6, 7], [8, 9], [10, 11]], GREEDY)
        assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH] * 3
        engine.audit()


def test_a_stream_beside_one_that_failed_ends_with_an_error(monkeypatch):
    with LLM(FOLDER, **SMALL, max_sequences=2) as llm:
        first, second = llm.stream([5, 6, 7], GREEDY), llm.stream([8, 9], GREEDY)
        next(first), next(second)
        worker = llm.engine._loop.worker
        monkeypatch.setattr(worker._forward, "run", failing(AssertionError("a fault of ours")))
        with pytest.raises(AssertionError, match="a fault of ours"):
            list(first)
        monkeypatch.undo()
        assert [output.finish_reason for output in second][-1] is FinishReason.ERROR
        llm.engine.audit()


def failing(error: BaseException):
    def call(*args, **kwargs):
        raise error

    return call


def test_another_on_error_is_refused():
    with LLM(FOLDER, **SMALL) as llm, pytest.raises(RequestError, match="`on_error` is 'outputs'"):
        llm.generate([5], GREEDY, on_error="outputs")


def test_a_request_that_outgrows_the_cache_ends_and_others_go_on():
    with LLM(FOLDER, **SMALL, num_blocks=12, max_sequences=2) as llm:
        greedy = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        short = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        long, other = llm.generate([[5] * 8, [6] * 8], [greedy, short])
        assert long.finish_reason is FinishReason.ERROR
        assert long.error_code == "cache_exhausted"
        assert long.token_ids
        assert len(other.token_ids) == 4
        llm.engine.audit()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "is empty"),
        ([5] * 100, "context is 100 tokens"),
        ([5, 512], "512"),
        ([5, -1], "-1"),
        ([5] * 60, "blocks"),
        ("", "is empty"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_others_complete(prompt, words):
    with LLM(FOLDER, **SMALL, num_blocks=12) as llm:
        with pytest.raises(RequestError, match=words):
            llm.generate([prompt] if prompt == [] else prompt, GREEDY)
        outputs = llm.generate([[5, 6], prompt, [7, 8]], GREEDY, on_error="output")
        assert [len(output.token_ids) for output in outputs] == [8, 0, 8]
        assert words in outputs[1].error


def test_a_client_id_in_use_is_refused():
    with LLM(FOLDER, **SMALL) as llm:
        prompts = [{"prompt_token_ids": [5], "client_id": "a"}] * 2
        with pytest.raises(DuplicateRequest, match="'a' is in use"):
            llm.generate(prompts, GREEDY)
        outputs = llm.generate(prompts, GREEDY, on_error="output")
        assert [output.finish_reason.value for output in outputs] == ["length", "error"]


def test_a_folder_without_tokenizer_says_why_it_is_needed(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json` is absent.*Engram"):
        LLM(tmp_path / "m", **SMALL)


def test_another_tokenizer_is_refused(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "m")
    write_checkpoint(tmp_path / "other", second_geometry_config(), seed=1)
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "m")
    with pytest.raises(ConfigError, match="folds to"):
        LLM(tmp_path / "m", **SMALL)


def test_a_half_written_folder_is_one_error(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(tmp_path / "m", **SMALL)


def test_stale_nan_in_unused_entries_is_never_seen():
    """Blocks and rings full of NaN, as another request may leave them, change nothing."""
    with LLM(FOLDER, **SMALL, numerics="ideal", determinism="strict") as llm:
        wanted = llm.generate([5, 6, 7] * 5, GREEDY)[0].token_ids
        state = llm.engine._loop.worker.state
        for sources in state.blocks.values():
            for source in sources.values():
                source.data.fill_(torch.nan)
        for ring in (*state.windows, *state.carried.values()):
            ring.data.fill_(torch.nan)
        assert llm.generate([5, 6, 7] * 5, GREEDY)[0].token_ids == wanted
