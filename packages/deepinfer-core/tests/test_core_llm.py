"""`LLM`: prompts in, outputs out, errors and interruptions in between. The engine is scripted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from deepinfer_core import (
    LLM,
    CheckpointError,
    ConfigError,
    DuplicateRequest,
    EngineConfig,
    FinishReason,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from deepinfer_core.bench.make_checkpoint import second_geometry_config, write_checkpoint
from deepinfer_core.engine.outputs import OutputBuilder
from deepinfer_core.model import nano


@pytest.fixture
def llm(scripted, tmp_path: Path) -> Iterator[LLM]:
    with LLM(tmp_path / "model") as made:
        yield made


EIGHT = SamplingParams(max_tokens=8)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


# prompts


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count) for count in (5, 1, 3)]
    outputs = llm.generate([[10, 11], [20], [30]], params)
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.token_ids for output in outputs] == [(10, 11, 10, 11, 10), (20,), (30, 30, 30)]


def test_text_ids_and_mappings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.encode("harbour")
    prompts = ["harbour", ids, {"prompt": "harbour"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=len(ids)))
    assert {output.prompt_token_ids for output in outputs} == {tuple(ids)}
    assert texts(outputs) == ["harbour"] * 4


@pytest.mark.parametrize("single", ["harbour", (10, 11), [10, 11], {"prompt": "harbour"}])
def test_one_prompt_gives_one_output(llm: LLM, single: object) -> None:
    assert len(llm.generate(single, EIGHT)) == 1  # type: ignore[arg-type]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_integers_of_numpy_are_ids(llm: LLM) -> None:
    assert llm.generate([list(numpy.array([10, 11]))], EIGHT)[0].prompt_token_ids == (10, 11)


def test_control_tokens_in_text_stay_text_and_none_is_added(llm: LLM) -> None:
    ids = llm.encode("<eos>a")
    assert not {0, 1} & set(ids)
    assert llm.decode(ids) == "<eos>a"


def test_special_tokens_are_left_out_of_decoded_text(llm: LLM) -> None:
    assert llm.decode([0, *llm.encode("boat"), 1]) == "boat"


@pytest.mark.parametrize(
    ("prompt", "param", "code", "message"),
    [
        ("", "prompt", "invalid_request", "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt", "invalid_request", "prompt is empty"),
        ([[5, 512]], "prompt_token_ids", "token_id_out_of_range", "512.*0 to 511"),
        ([[5, -1]], "prompt_token_ids", "token_id_out_of_range", "-1"),
        ([[5, True]], "prompt_token_ids", "token_id_out_of_range", "True"),
        ([[5, "a"]], "prompt_token_ids", "token_id_out_of_range", "'a'"),
        ([5, 510], "prompt_token_ids", "image_input", "image id 510 at place 1"),
        ([5] * 128, "prompt", "context_length_exceeded", "128 tokens.*Shorten"),
        ("\ud800", "prompt", "invalid_request", "surrogate"),
        ([None], "prompt", "invalid_request", "NoneType"),
        ({"text": "a"}, "text", "unknown_field", "Known: `prompt`"),
        ({"promt": "a"}, "promt", "unknown_field", "mean `prompt`"),
        ({}, "prompt", "invalid_request", "neither"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "prompt", "invalid_request", "both"),
        ({"prompt": [5]}, "prompt", "invalid_request", "list; it must be a text"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids", "invalid_request", "str; it must be"),
        ({"prompt": "a", "client_id": 7}, "client_id", "invalid_request", "int"),
    ],
)
def test_bad_prompt_is_an_error_that_names_it(
    llm: LLM, prompt: object, param: str, code: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompt)  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(stop_token_ids=(512,)), SamplingParams(logit_bias={600: 1.0})],
)
def test_ids_in_settings_must_exist(llm: LLM, params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="0 to 511"):
        llm.generate("a", params)


def test_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    assert len(llm.generate([5] * 127, EIGHT)) == 1


def test_params_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], [EIGHT, EIGHT])


def test_first_bad_prompt_is_named_and_nothing_runs(llm: LLM, scripted) -> None:
    with pytest.raises(RequestError, match=r"^Prompt 1: The prompt is empty"):
        llm.generate(["a", "", "c"], EIGHT)
    assert scripted.requests == []


def test_bad_prompts_become_outputs_and_the_others_complete(llm: LLM) -> None:
    outputs = llm.generate([[10], "", [20]], SamplingParams(max_tokens=2), on_error="output")
    assert [output.finish_reason for output in outputs] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert outputs[1].index == 1
    assert "is empty" in str(outputs[1].error)
    assert (outputs[1].error_param, outputs[1].error_code) == ("prompt", "invalid_request")


def test_client_id_in_use_is_refused_and_the_first_completes(llm: LLM) -> None:
    prompts = [{"prompt": "a", "client_id": "x"}, {"prompt": "b", "client_id": "x"}]
    with pytest.raises(DuplicateRequest, match="Prompt 1"):
        llm.generate(prompts, EIGHT)
    outputs = llm.generate(prompts, EIGHT, on_error="output")
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert [output.client_id for output in outputs] == ["x", "x"]


def test_request_that_fails_while_it_runs_does_not_stop_the_others(llm: LLM, scripted) -> None:
    scripted.script = lambda request: [10, -1 if request.uid == 0 else 11]
    outputs = llm.generate([[5], [6]], SamplingParams(max_tokens=2))
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert (outputs[0].error, outputs[0].token_ids) == ("No finite logit.", (10,))
    assert outputs[0].error_code == "non_finite"
    assert outputs[1].token_ids == (10, 11)


# settings


def test_seeds_are_derived_from_the_engine_seed_and_the_number_of_the_request(
    llm: LLM, scripted, tmp_path: Path
) -> None:
    llm.generate(["a", "", "b"], EIGHT, on_error="output")
    first = [request.seed for request in scripted.requests]
    assert len(set(first)) == 2
    scripted.requests.clear()
    again = LLM(tmp_path / "model")
    again.generate(["x", "y", "z"], EIGHT)
    seeds = [request.seed for request in scripted.requests]
    assert [seeds[0], seeds[2]] == first
    scripted.requests.clear()
    LLM(tmp_path / "model", seed=1).generate(["x"], EIGHT)
    assert scripted.requests[0].seed not in seeds


def test_given_seed_is_used_as_it_is(llm: LLM, scripted) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=1, seed=77))
    assert [request.seed for request in scripted.requests] == [77, 77]


def test_end_of_sequence_ends_a_request_unless_ignored(llm: LLM, scripted) -> None:
    llm.generate("a", SamplingParams(max_tokens=1, stop_token_ids=(9,)))
    llm.generate("a", SamplingParams(max_tokens=1, stop_token_ids=(9,), ignore_eos=True))
    assert [request.stop_ids for request in scripted.requests] == [{1, 9}, {9}]


@pytest.mark.parametrize(
    ("params", "strict", "replay"),
    [
        (SamplingParams(), False, "decoder"),
        (SamplingParams(bounded_replay="off"), False, "off"),
        (SamplingParams(prompt_logprobs=0), False, "off"),
        (SamplingParams(determinism="strict"), True, "off"),
        (SamplingParams(determinism="strict", bounded_replay="off"), True, "off"),
    ],
)
def test_mode_and_replay_are_resolved_and_reported(
    llm: LLM, scripted, params: SamplingParams, strict: bool, replay: str
) -> None:
    long, short = llm.generate([[5] * 20, [5] * 8], params)
    assert [request.strict for request in scripted.requests] == [strict, strict]
    assert long.determinism == ("strict" if strict else "normal")
    assert long.bounded_replay == replay
    assert short.bounded_replay == "off"  # one window holds all of it


def test_engine_may_be_strict_for_all(scripted, tmp_path: Path) -> None:
    llm = LLM(tmp_path / "model", determinism="strict")
    loose = SamplingParams(determinism="normal", max_tokens=1)
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), loose])
    assert [output.determinism for output in outputs] == ["strict", "normal"]


@pytest.mark.parametrize("exact", [{"determinism": "strict"}, {"prompt_logprobs": 1}])
def test_replay_is_refused_where_the_prefill_must_be_exact(llm: LLM, exact: dict) -> None:
    with pytest.raises(RequestError, match="exact prefill") as caught:
        llm.generate("a", SamplingParams(bounded_replay="decoder", **exact))
    assert caught.value.param == "bounded_replay"


def test_stop_string_ends_the_request_in_the_engine_too(llm: LLM, scripted) -> None:
    ids = llm.encode("boat ship harbour")
    output = llm.generate([ids], SamplingParams(stop=("ship",), logprobs=0))[0]
    assert output.text == "boat "
    assert output.finish_reason is FinishReason.STOP
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert scripted.finished == [(0, FinishReason.STOP)]
    assert not scripted.has_work


def test_stop_string_in_the_last_token_does_not_end_it_twice(llm: LLM, scripted) -> None:
    ids = llm.encode("ab")
    output = llm.generate([ids], SamplingParams(stop=("b",), max_tokens=len(ids)))[0]
    assert output.finish_reason is FinishReason.STOP
    assert scripted.finished == []


# streams


def test_stream_yields_what_is_new_and_ends_with_the_whole(llm: LLM) -> None:
    outputs = list(llm.stream("harbour town", SamplingParams(max_tokens=9)))
    assert len(outputs) > 2
    assert "".join(output.delta for output in outputs) == outputs[-1].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_bad_prompt_fails_when_the_stream_is_made(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.stream("")


def test_closing_a_stream_aborts_it_and_the_engine_serves_on(llm: LLM, scripted) -> None:
    stream = llm.stream(["a", "b"], SamplingParams(max_tokens=50))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert scripted.aborted == ["request-0", "request-1"]
    assert len(llm.generate("c", EIGHT)) == 1


def test_exception_in_on_step_aborts_the_batch(llm: LLM, scripted) -> None:
    def refuse(ended: Sequence[RequestOutput]) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50), on_step=refuse)
    assert not scripted.has_work


def test_two_streams_share_the_steps(llm: LLM) -> None:
    first = llm.stream([[10]], SamplingParams(max_tokens=6))
    second = llm.stream([[20]], SamplingParams(max_tokens=3))
    next(first)
    assert [output.token_ids[-1] for output in second] == [20, 20, 20]
    assert list(first)[-1].token_ids == (10,) * 6


def test_abort_ends_a_stream_with_that_reason(llm: LLM) -> None:
    stream = llm.stream({"prompt": "a", "client_id": "x"}, SamplingParams(max_tokens=50))
    next(stream)
    assert llm.abort("x")
    assert [output.finish_reason for output in stream][-1] is FinishReason.ABORT
    assert not llm.abort("x")


def test_close_ends_open_streams_and_the_engine(llm: LLM, scripted) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=50))
    next(stream)
    llm.close()
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    assert scripted.closed


def test_on_step_sees_each_step_and_each_request_that_ended(llm: LLM) -> None:
    steps: list[list[RequestOutput]] = []
    params = [SamplingParams(max_tokens=count) for count in (3, 1, 3, 1)]
    prompts = [[10], [20], [30], []]
    outputs = llm.generate(
        prompts, params, on_step=lambda ended: steps.append(list(ended)), on_error="output"
    )
    indices = [[output.index for output in ended] for ended in steps]
    assert indices == [[3], [1], [], [0, 2]]
    assert [steps[3][0], steps[1][0], steps[3][1], steps[0][0]] == outputs


def test_generate_makes_one_output_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = OutputBuilder.next_output

    def count(builder: OutputBuilder) -> RequestOutput | None:
        made.append(1)
        return real(builder)

    monkeypatch.setattr(OutputBuilder, "next_output", count)
    llm.generate([[10], [20]], SamplingParams(max_tokens=30), on_step=lambda ended: None)
    assert len(made) == 2


# Ctrl-C


def test_interrupt_waits_for_the_step_and_loses_nothing_that_is_finished(
    llm: LLM, scripted
) -> None:
    steps: list[str] = []

    def press() -> None:
        if len(scripted.requests) == 2 and not steps:
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    scripted.before_step = press
    seen: list[RequestOutput] = []
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=50)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[10], [20]], params, on_step=seen.extend)
    assert steps == ["went on"]
    assert [output.index for output in seen] == [0]
    assert scripted.aborted == ["request-1"]
    scripted.before_step = lambda: None
    assert llm.generate([[30]], params[0])[0].token_ids == (30,)


def test_interrupt_waits_until_all_that_a_step_finished_is_delivered(llm: LLM, scripted) -> None:
    seen: list[int] = []

    def take(ended: Sequence[RequestOutput]) -> None:
        for output in ended:
            if output.index == 0:
                signal.raise_signal(signal.SIGINT)
            seen.append(output.index)

    params = [SamplingParams(max_tokens=count) for count in (2, 2, 50)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[10], [20], [30]], params, on_step=take)
    assert seen == [0, 1]
    assert scripted.aborted == ["request-2"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_stream_yields_what_its_last_step_produced(llm: LLM, scripted) -> None:
    scripted.before_step = lambda: signal.raise_signal(signal.SIGINT)
    stream = llm.stream([[10], [20]], EIGHT)
    assert [next(stream).index, next(stream).index] == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not scripted.has_work


def test_second_interrupt_does_not_wait(llm: LLM, scripted) -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    scripted.before_step = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", EIGHT)
    assert not scripted.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# construction


def test_options_come_from_keywords_over_the_environment(
    scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_MAX_SEQUENCES", "3")
    monkeypatch.setenv("DEEPINFER_SEED", "4")
    config = LLM(tmp_path / "model", seed=5).config
    assert (config.max_sequences, config.seed) == (3, 5)


def test_unknown_option_is_refused(scripted, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mean `max_sequences`"):
        LLM(tmp_path / "model", max_sequence=3)


def test_config_of_another_kind_is_refused_by_value(scripted) -> None:
    with pytest.raises(ConfigError, match=r"`config` is 'x\.toml'; allowed: an `EngineConfig`"):
        LLM(config="x.toml")


def test_a_closed_engine_takes_no_requests(scripted, tmp_path: Path) -> None:
    with LLM(tmp_path / "model") as made:
        made.generate("hi", EIGHT)
    with pytest.raises(RequestError, match="closed"):
        made.generate("hi", EIGHT)
    with pytest.raises(RequestError, match="closed"):
        next(made.stream("hi", EIGHT))


def test_options_are_given_in_one_way(scripted, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "model"))
    assert LLM(config=config).config is config
    with pytest.raises(ConfigError, match="`seed`, `model` and `config`"):
        LLM("model", config=config, seed=1)


def test_model_that_comes_with_the_package_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nano, "files", lambda package: tmp_path)
    monkeypatch.delenv("DEEPINFER_MODEL", raising=False)
    with pytest.raises(CheckpointError, match="`deepinfer-nano`"):
        LLM()
    write_checkpoint(tmp_path / "nano_model", second_geometry_config(), seed=0)
    with LLM(accelerator="cpu", num_threads=torch.get_num_threads()) as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=2))[0].token_ids


def test_folder_without_a_tokenizer_serves_ids(scripted, tmp_path: Path) -> None:
    (tmp_path / "model/tokenizer.json").unlink()
    llm = LLM(tmp_path / "model")
    assert llm.tokenizer is None
    output = llm.generate([[10]], SamplingParams(max_tokens=2))[0]
    assert (output.token_ids, output.text) == ((10, 10), "")
    with pytest.raises(RequestError, match=r"no tokenizer.json.*prompt_token_ids"):
        llm.generate("a")


def test_broken_tokenizer_is_an_error_that_names_the_file(scripted, tmp_path: Path) -> None:
    (tmp_path / "model/tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer.json` is not a tokenizer"):
        LLM(tmp_path / "model")


def test_tokenizer_without_added_tokens_is_one(scripted, tmp_path: Path) -> None:
    file = tmp_path / "model/tokenizer.json"
    content = json.loads(file.read_text())
    del content["added_tokens"]
    file.write_text(json.dumps(content))
    llm = LLM(tmp_path / "model")
    assert llm.decode(llm.encode("harbour")) == "harbour"


def test_truncation_in_the_tokenizer_file_does_not_cut_prompts(
    scripted, tmp_path: Path, tokenizer
) -> None:
    changed = type(tokenizer).from_str(tokenizer.to_str())
    changed.enable_truncation(3)
    changed.save(str(tmp_path / "model/tokenizer.json"))
    text = "a long text about a harbour"
    assert LLM(tmp_path / "model").decode(LLM(tmp_path / "model").encode(text)) == text


# with a model


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, second_geometry_config(), quantized=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # quicker for tensors as small as these
    with LLM(folder, numerics="ideal", determinism="strict", max_step_tokens=8) as llm:
        yield llm
    torch.set_num_threads(threads)


def test_text_of_a_model_is_the_same_alone_in_a_batch_and_as_a_stream(real: LLM) -> None:
    prompts = ["the harbour", "a boat and a ship in the morning", [5]]
    params = SamplingParams(max_tokens=6, seed=3, logprobs=1, ignore_eos=True)
    batch = real.generate(prompts, params)
    alone = [real.generate([prompt], params)[0] for prompt in prompts]
    streamed = [list(real.stream([prompt], params))[-1] for prompt in prompts]
    for one, other, third in zip(batch, alone, streamed, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.text == other.text == third.text == real.decode(one.token_ids)
        assert one.logprobs == other.logprobs == third.logprobs


def test_model_serves_on_after_a_stream_was_left(real: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    for output in real.stream(["the harbour", "a boat"], params):
        if len(output.token_ids) > 1:
            break
    real.engine.audit()
    assert len(real.generate("a boat", params)[0].token_ids) == 20


def test_stop_string_ends_text_of_a_model(real: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    whole = real.generate("the harbour", params)[0]
    middle = whole.text[len(whole.text) // 2 :][:2]
    output = real.generate("the harbour", replace(params, stop=(middle,)))[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.text == whole.text[: whole.text.index(middle)]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    real.engine.audit()


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], ["greedy"], 3])
def test_params_of_another_type_are_refused(scripted, tmp_path, params) -> None:
    with LLM(tmp_path / "model") as llm, pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(["a"], params)
