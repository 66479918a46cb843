"""One trace, served in every way there is, yields the same bits; and replay does what it says.

Of the ways in `testing/differential_variants.py` the suite takes those that cover each pair of
values; `benchmarks/differential.py` takes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_core.bench.make_checkpoint import write_checkpoint
from deepinfer_core.bench.whole_texts import open_model
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.engine import verification as verification_module
from deepinfer_core.errors import CheckpointError, RequestError
from deepinfer_core.llm import LLM
from deepinfer_core.model import nano
from deepinfer_core.model.state import ModelState
from deepinfer_core.plans import StepKind, StepPlan
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.differential import Bench, Report
from deepinfer_core.testing.differential_trace import layout_for, trace
from deepinfer_core.testing.differential_variants import VALUES, Variant, covering
from deepinfer_core.testing.driven_loop import DrivenLoop, make_request
from deepinfer_core.testing.planners import ChosenPlanner
from deepinfer_core.testing.tiny_model import tiny_config
from deepinfer_core.types import FinishReason, RequestOutput, SamplingParams

SUITE = {**VALUES, "block_size": (2, 4), "numerics": ("release",)}
VARIANTS = covering(SUITE)


def with_each_value(variants: list[Variant]) -> int:
    """Return how many of the first variants have every value of every dimension."""
    wanted = {(name, value) for name, allowed in SUITE.items() for value in allowed}
    for count, variant in enumerate(variants, start=1):
        wanted -= {(name, getattr(variant, name)) for name in SUITE}
        if not wanted:
            return count
    raise AssertionError(f"no variant has {wanted}")


# Each value in the default run, each pair of values in the slow one: 38 variants, 3 s each.
EACH_VALUE = with_each_value(VARIANTS)
WINDOW = 8
BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Run with one thread: quicker for tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("differential") / "tiny"
    write_checkpoint(path, tiny_config(), seed=3, quantized=False)
    return path


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    return Bench({"release": open_model(folder, CpuBackend("release"))})


@pytest.fixture(scope="module")
def served(bench: Bench) -> Callable[[Variant], Report]:
    """Serve in a way, once."""
    return cache(bench.run)


# Differential runs


def test_the_suite_covers_every_pair_of_values_that_goes_together() -> None:
    def impossible(pair: dict[str, object]) -> bool:
        if "gamma" in pair and "drafter" in pair:
            return (pair["gamma"] == 0) != (pair["drafter"] == "none")
        if pair.get("lengths") == "some":
            return pair.get("gamma") == 0 or pair.get("drafter") == "none"
        alone = pair.get("company") == "alone"
        return alone and (pair.get("pool") in ("tight", "least") or pair.get("grammars") is False)

    for one, other in combinations(SUITE, 2):
        for values in product(SUITE[one], SUITE[other]):
            pair = dict(zip((one, other), values, strict=True))
            found = any(all(getattr(v, n) == w for n, w in pair.items()) for v in VARIANTS)
            assert found != impossible(pair), pair


def test_the_references_end_in_every_way(bench: Bench) -> None:
    layout = layout_for(BLOCK)
    found = bench.references(layout, "release")
    assert all(outcome.error is None for outcome in found.values())
    stopped = {name for name, each in found.items() if each.finish_reason is FinishReason.STOP}
    assert stopped == {"one stop", "many stops", "grammar that ends"}
    assert all(len(found[name].tokens) > 1 for name in stopped)
    (context,) = (s for s in trace(layout, grammars=False, aborts=False) if s.name == "context")
    assert len(context.prompt) + len(found["context"].tokens) == layout.max_model_len
    assert len(found["one token"].prompt_logprobs) == 9


@pytest.mark.parametrize(
    "variant",
    [
        *VARIANTS[:EACH_VALUE],
        *(pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS[EACH_VALUE:]),
    ],
    ids=str,
)
def test_every_way_of_serving_yields_the_bits_of_each_request_alone(
    served, variant: Variant
) -> None:
    report = served(variant)
    assert not report.differences
    # What the variant is to test must have happened.
    assert not report.preemptions or variant.pool != "loose"
    assert (report.late_sampling > 0) == variant.grammars
    if variant.pool == "loose":  # else the pool may have had no room for a cache
        assert (report.cold_hits > 0) == (variant.cache != "off")
        assert (report.warm_hits > report.cold_hits) == (variant.cache == "warm")
    assert (report.trimmed > 0) == (variant.lengths == "some")
    if variant.drafter in ("right", "mixed"):
        assert report.accepted > 0


@pytest.mark.slow
def test_sequences_are_preempted_where_the_pool_is_not_loose(served) -> None:
    preempted = [v for v in VARIANTS if v.pool != "loose" and served(v).preemptions]
    for name in ("depth", "cache", "block_size", "grammars", "pool", "company"):
        values = set(SUITE[name]) - {"loose", "alone"}
        assert {getattr(variant, name) for variant in preempted} == values


def test_a_request_that_has_its_prefix_twice_does_not_end_by_a_full_cache() -> None:
    """The second of two equal prompts keeps the first one's published blocks beside its own."""
    limits = SchedulerLimits(
        block_size=4,
        num_blocks={"compressed": 9, "index": 9},
        num_slots=2,
        max_model_len=32,
        max_step_tokens=64,
        max_chunk_tokens=64,
        window=6,
        prefix_cache=True,
        growth_permille=0,
    )
    driven = DrivenLoop(limits, depth=0)
    prompt = tuple(range(3, 16))
    for uid, length in ((1, 2), (2, 18)):
        driven.submit(make_request(uid, prompt, max_tokens=length, replay_encoder=True))
    driven.run()
    assert driven.end(2).finish_reason is FinishReason.LENGTH
    driven.expect_reference()


def first_with(**values: object) -> Variant:
    """Return a variant of the suite, which is known to be right."""
    return next(v for v in VARIANTS if all(getattr(v, n) == w for n, w in values.items()))


def test_drafts_accepted_by_mistake_are_found(bench: Bench, monkeypatch) -> None:
    def all_of_them(targets, faults, drafts, counts):
        return counts

    monkeypatch.setattr(verification_module, "num_accepted", all_of_them)
    assert bench.run(first_with(drafter="wrong", chunk="whole", cache="cold")).differences


def test_device_that_verifies_more_than_there_is_room_for_is_found(
    bench: Bench, monkeypatch
) -> None:
    """The last sequences of a step then lack rows, and say what nobody computed."""

    def all_of_them(self, survival, available, total):
        return available.int()

    monkeypatch.setattr(ChosenPlanner, "lengths", all_of_them)
    assert bench.run(first_with(lengths="some", company="batch")).differences


def test_warm_hits_resume_from_stored_windows(bench: Bench, monkeypatch) -> None:
    """Where these are not copied, what follows the hits differs."""
    monkeypatch.setattr(ModelState, "copy_slots", lambda self, pairs: None)
    report = bench.run(first_with(cache="warm", pool="loose"))
    assert any("time 1" in difference for difference in report.differences)


# The engine as users see it


class Watched:
    """An `LLM` on the tiny model whose plans are kept."""

    def __init__(self, folder: Path, **options: object) -> None:
        settings = {"numerics": "ideal", "block_size": BLOCK, "max_model_len": 120, **options}
        self.llm = LLM(folder, **settings)
        self.plans: list[StepPlan] = []
        self.worker = self.llm.engine._loop.worker
        launch = self.worker.launch

        def kept(plan: StepPlan):
            self.plans.append(plan)
            return launch(plan)

        self.worker.launch = kept

    def serve(self, prompt: list[int], **settings: object) -> RequestOutput:
        """Complete a prompt; `plans` are then those of this request alone."""
        self.plans.clear()
        params = {"max_tokens": 5, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
        return self.llm.generate([prompt], SamplingParams(**{**params, **settings}))[0]

    @property
    def chunks(self) -> list[StepPlan]:
        return [plan for plan in self.plans if plan.output.kind is StepKind.PREFILL]

    def column(self, name: str) -> list[int]:
        """Return a column of the request's chunks."""
        return [int(getattr(plan.rows, name)[0]) for plan in self.chunks]

    def blocks(self, ids: dict[str, np.ndarray]) -> list[torch.Tensor]:
        """Return copies of the content of blocks."""
        stores = self.worker.state.blocks
        return [
            source.data[torch.from_numpy(ids[pool])].clone()
            for pool, sources in stores.items()
            for source in sources.values()
        ]


@pytest.fixture
def watched(folder: Path) -> Iterator[Watched]:
    found = Watched(folder)
    yield found
    found.llm.engine.audit()
    found.llm.close()


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(17 * number + 31 * i * i + 7 * i) % 300 + 5 for i in range(length)]


@pytest.mark.parametrize("length", [61, 62, 63, 64, 65])
def test_a_warm_hit_computes_at_most_a_block_beside_the_replayed_window(watched, length) -> None:
    hit = (length - 1) // BLOCK * BLOCK
    cold = watched.serve(prompt_of(length))
    assert cold.num_cached_tokens == 0 and cold.bounded_replay == "decoder"
    assert watched.column("num_replay") == [0]
    warm = watched.serve(prompt_of(length))
    assert warm.num_cached_tokens == hit and warm.bounded_replay == "both"
    assert watched.column("start") == watched.column("window_start") == [hit - WINDOW]
    assert watched.column("num_replay") == [WINDOW]
    assert watched.column("num_rows") == [WINDOW + length - hit]
    assert length - hit <= BLOCK
    assert watched.column("tail_start") == [length - WINDOW]
    assert len(warm.token_ids) == 5 and warm.finish_reason is FinishReason.LENGTH


def test_replay_writes_no_block_of_the_hit(watched) -> None:
    prompt, hit = prompt_of(63), 60
    watched.serve(prompt)
    shared = {
        pool: delta.block_ids[delta.places < hit // BLOCK]
        for pool, delta in watched.plans[0].tables.items()
    }
    assert all(len(ids) == hit // BLOCK for ids in shared.values())
    before = watched.blocks(shared)
    assert all(bool(block.any()) for block in before)
    warm = watched.serve(prompt)
    assert warm.num_cached_tokens == hit
    for pool, delta in watched.plans[0].tables.items():
        named = delta.block_ids[delta.places < hit // BLOCK]
        assert named.tolist() == shared[pool].tolist()
    after = watched.blocks(shared)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("replay", "num_replay", "tail_start"),
    [("off", 0, 0), ("encoder", WINDOW, 0), ("decoder", 0, 55), ("both", WINDOW, 55)],
)
def test_each_value_of_bounded_replay_does_what_it_says(
    folder, replay, num_replay, tail_start
) -> None:
    prompt, hit = prompt_of(63), 60
    watched = Watched(folder, stored_windows=2)
    cold = watched.serve(prompt, bounded_replay=replay)
    assert watched.column("tail_start")[0] == tail_start and cold.num_cached_tokens == 0
    assert cold.bounded_replay == ("decoder" if tail_start else "off")
    warm = watched.serve(prompt, bounded_replay=replay)
    assert warm.bounded_replay == replay and warm.num_cached_tokens == hit
    assert watched.column("num_replay") == [num_replay]
    assert watched.column("start") == [hit - num_replay]
    assert watched.column("tail_start") == [tail_start]
    loads = [len(plan.output.window_loads) for plan in watched.chunks]
    assert loads == [0 if num_replay else 1]
    if replay == "off":  # nothing was approximated
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    watched.llm.engine.audit()
    watched.llm.close()


@pytest.mark.parametrize(("replay", "hit"), [("off", 0), ("encoder", 60), ("decoder", 0)])
def test_without_stored_windows_only_encoder_replay_lets_a_prefix_be_found(
    watched, replay, hit
) -> None:
    watched.serve(prompt_of(63))
    warm = watched.serve(prompt_of(63), bounded_replay=replay)
    assert warm.num_cached_tokens == hit
    assert warm.bounded_replay == replay


@pytest.mark.parametrize("replay", ["encoder", "decoder", "both"])
@pytest.mark.parametrize("by_engine", [False, True])
def test_strict_mode_refuses_replay(folder, replay, by_engine) -> None:
    llm = LLM(folder, determinism="strict" if by_engine else "normal", max_model_len=64)
    asked = None if by_engine else "strict"
    with pytest.raises(RequestError, match="bounded_replay") as caught:
        llm.generate([prompt_of(20)], SamplingParams(bounded_replay=replay, determinism=asked))
    assert caught.value.param == "bounded_replay"
    params = SamplingParams(bounded_replay="off", determinism=asked, max_tokens=1)
    assert llm.generate([prompt_of(20)], params)[0].determinism == "strict"
    llm.close()


@pytest.mark.parametrize("replay", ["encoder", "both"])
@pytest.mark.parametrize("length", [5, 8, 9, 10, 12])
def test_a_hit_not_longer_than_the_window_is_exact(watched, replay, length) -> None:
    cold = watched.serve(prompt_of(length), bounded_replay=replay)
    warm = watched.serve(prompt_of(length), bounded_replay=replay)
    assert 0 < warm.num_cached_tokens <= WINDOW
    assert watched.column("start") == [0]
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_a_hit_longer_than_the_window_is_not_exact(watched) -> None:
    """Else the test of short hits would say nothing."""
    cold = watched.serve(prompt_of(63), bounded_replay="encoder")
    warm = watched.serve(prompt_of(63), bounded_replay="encoder")
    assert warm.logprobs != cold.logprobs


def test_strict_requests_find_stored_windows_though_slots_change_roles(folder) -> None:
    """A slot that stores a window may be a sequence's later, and the other way round."""
    prompts = [prompt_of(length, number) for number, length in enumerate((21, 34, 9, 46, 27))]
    params = SamplingParams(max_tokens=4, seed=4, temperature=1.0, logprobs=1, ignore_eos=True)
    options = {"determinism": "strict", "block_size": BLOCK, "max_model_len": 80}
    with LLM(folder, prefix_cache=False, depth=0, **options) as llm:
        wanted = [llm.generate([prompt], params)[0] for prompt in prompts]
    with LLM(folder, stored_windows=5, max_sequences=2, **options) as llm:
        for warm in range(2):
            found = llm.generate(prompts, params)
            for one, other in zip(wanted, found, strict=True):
                assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
                hit = (len(one.prompt_token_ids) - 1) // BLOCK * BLOCK if warm else 0
                assert other.num_cached_tokens == hit and other.bounded_replay == "off"
        llm.engine.audit()


# Depth


TEXTS = ["Once upon a time", "2+3=", "Hello, how are you?", "The harbour lay", "a"]
SETTINGS = [
    SamplingParams(max_tokens=7, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=5, logprobs=0),
    SamplingParams(max_tokens=5, temperature=0.8, seed=6, repetition_penalty=1.2, logprobs=1),
    SamplingParams(max_tokens=4, temperature=1.3, seed=7, top_k=20, prompt_logprobs=1),
    SamplingParams(max_tokens=8, temperature=0.9, seed=8, stop=("a", "e", " "), ignore_eos=True),
]


def told(output: RequestOutput) -> RequestOutput:
    """Return an output without what names the request or tells how it was served."""
    return replace(output, client_id="", num_preemptions=0, num_cached_tokens=0)


def test_depth_changes_no_output_of_the_model_that_comes_with_the_package() -> None:
    try:
        nano.folder()
    except CheckpointError:
        pytest.skip("the weights of deepinfer-nano were left out of this checkout")
    found = {}
    for depth in range(3):
        options = {"determinism": "strict", "max_sequences": 3, "max_model_len": 128}
        with LLM(depth=depth, block_size=16, **options) as llm:
            found[depth] = [told(output) for output in llm.generate(TEXTS, SETTINGS)]
            llm.engine.audit()
    assert found[0] == found[1] == found[2]
    assert {output.finish_reason for output in found[0]} >= {FinishReason.LENGTH, FinishReason.STOP}


def test_a_stream_with_an_abort_in_the_middle_is_that_of_the_serial_engine(folder) -> None:
    prompts = [
        {"prompt_token_ids": prompt_of(length, number), "client_id": f"c{number}"}
        for number, length in enumerate((30, 17, 9, 24))
    ]
    params = [
        SamplingParams(max_tokens=12, temperature=0.9, seed=number, logprobs=1, ignore_eos=True)
        for number in range(4)
    ]
    options = {"determinism": "strict", "block_size": BLOCK, "max_sequences": 3}
    with LLM(folder, depth=0, max_model_len=80, **options) as llm:
        wanted = [told(output) for output in llm.generate(prompts, params)]
    with LLM(folder, depth=2, max_model_len=80, num_blocks=12, **options) as llm:
        last: dict[int, RequestOutput] = {}
        texts = dict.fromkeys(range(4), "")
        for output in llm.stream(prompts, params):
            assert output.index not in last or not last[output.index].finished
            last[output.index] = output
            texts[output.index] += output.delta
            if output.index == 1 and len(output.token_ids) == 4 and not output.finished:
                assert llm.engine._loop.num_unsettled
                assert llm.abort("c1") and not llm.abort("c1")
        llm.engine.audit()
        assert llm.engine.counts.inflight_tokens == 0
        assert llm.engine.stats.preemptions > 0
        again = [told(output) for output in llm.generate(prompts, params)]
    gone = last[1]
    assert gone.finish_reason is FinishReason.ABORT
    assert gone.token_ids == wanted[1].token_ids[: len(gone.token_ids)]
    assert 4 <= len(gone.token_ids) < 12
    for index in (0, 2, 3):
        assert told(last[index]) == replace(wanted[index], delta=last[index].delta)
    for index, output in last.items():
        assert texts[index] == output.text
    assert again == wanted


def test_repeated_prompts_that_load_and_need_the_same_slots_all_end(folder) -> None:
    """A window that one of them is to load cannot be evicted for the slot of another."""
    options: dict[str, object] = {"max_model_len": 96, "num_blocks": 64, "block_size": BLOCK}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(
        folder,
        accelerator="cpu",
        determinism="strict",
        stored_windows=1,
        max_sequences=2,
        **options,
    ) as llm:
        first = [llm.generate([ids], params)[0] for ids in ([5] * 40, [7] * 40)]
        again = llm.generate([[5] * 40, [7] * 40], params)
        assert [each.token_ids for each in again] == [each.token_ids for each in first]
        llm.engine.audit()


def test_exact_requests_never_meet_blocks_that_stand_behind_a_replay(folder) -> None:
    watched = Watched(folder, stored_windows=4, numerics="ideal")
    prompt = prompt_of(63)
    watched.serve(prompt[:33], bounded_replay="encoder")
    assert watched.serve(prompt, bounded_replay="encoder").num_cached_tokens > 0
    cold = watched.serve(prompt, bounded_replay="off")
    warm = watched.serve(prompt, bounded_replay="off")
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 60
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    watched.llm.close()
