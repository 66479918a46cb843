"""`SamplingParams.constraint`: a recipe compiles it, the engine enforces it, its text is judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from deepinfer_core import LLM, ConfigError, FinishReason, RequestError, SamplingParams
from deepinfer_core.cli import main
from deepinfer_core.engine.verification import Picks
from deepinfer_core.metrics import Metrics
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.scheduler.constraints import ConstraintFailed, Window, masks_of
from deepinfer_core.testing.driven_loop import AnyToken
from deepinfer_core.testing.one_by_one import OneByOne
from deepinfer_core.testing.planners import RandomPlanner, ScriptedVerifier

FOLDER = Path(__file__).parents[3] / "tests" / "conformance" / "model" / "tiny_a_fp"
A = SamplingParams(max_tokens=8, constraint={"choice": ["a"]})


class Refused(Exception):
    param, code, status_code = "constraint.regex", "unsupported_constraint", 400


class Steps(OneByOne):
    """A matcher of ids: at place n one of `choices[n]` may stand, and the text ends behind them.

    It trusts nobody: an advance or a question behind its end is an error.
    """

    def __init__(self, choices: Sequence[Sequence[int]], vocab_size: int = 512) -> None:
        self._choices, self._vocab_size = choices, vocab_size
        self._place = 0

    @property
    def done(self) -> bool:
        return self._place == len(self._choices)

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        assert not self.done, "asked after its end"
        rows[:] = 0
        bits = np.zeros((len(rows), 32 * rows.shape[1]), dtype=np.uint8)
        taken = 0
        while self._place + taken < len(self._choices):
            choice = self._choices[self._place + taken]
            bits[taken, list(choice)] = 1
            if taken == len(drafts) or drafts[taken] not in choice:
                break
            taken += 1
        rows[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return taken

    def accept(self, token_ids: Sequence[int]) -> int:
        assert not self.done, "advanced after its end"
        for taken, token_id in enumerate(token_ids):
            if self.done or token_id not in self._choices[self._place]:
                return taken
            self._place += 1
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        found: list[int] = []
        for choice in self._choices[self._place :]:
            if len(choice) > 1:
                break
            found += choice
        return found


@dataclass
class Grammar:
    """Judges a text by whether it is the wanted one."""

    wanted: str
    made: Callable[[], Any] = AnyToken
    warnings: tuple[str, ...] = ()

    def matcher(self) -> Any:
        return self.made()

    def fault_of(self, text: str) -> str | None:
        return None if text == self.wanted else f"it is not {self.wanted!r}"


@dataclass
class Recipe:
    """Knows choices of one text, and ids: `{"ids": [[1, 2], [3]]}`."""

    request_error = Refused
    compiled: list[Mapping[str, object]] = field(default_factory=list)

    def grammar(self, constraint: Mapping[str, Any]) -> Grammar:
        self.compiled.append(constraint)
        if "choice" in constraint:
            return Grammar(constraint["choice"][0], warnings=("a note",))
        if "ids" in constraint:
            return Grammar("", lambda: Steps(constraint["ids"]))
        raise Refused(f"{next(iter(constraint))} is beyond it")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    made = Recipe()
    monkeypatch.setattr("deepinfer_core.llm.find_recipe", lambda model_type, file: made)
    return made


@pytest.fixture
def llm(scripted: Any, tmp_path: Path) -> Iterator[LLM]:
    scripted.model_config.model_type = "deepseek_v41"
    with LLM(tmp_path / "model") as made:
        yield made


# Masks


class Raw(AnyToken):
    """Fills rows as it is told."""

    def __init__(self, *words: int, forced: Sequence[int] = ()) -> None:
        self._words, self._forced = words, forced

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        rows[:] = np.array(self._words, dtype=np.int32)[:, None]
        return 0

    def forced(self) -> Sequence[int]:
        return self._forced


def masks(matcher: Any, drafts: Sequence[int], max_drafts: int = 3) -> tuple[list[Any], Any]:
    """Return the words of masks over 40 ids, and what is forced."""
    limits = SimpleNamespace(vocab_size=40, max_drafts=max_drafts)
    found, faults = masks_of({7: Window(matcher, drafts)}, cast(SchedulerLimits, limits))
    if faults:
        raise ConstraintFailed(faults[7])
    return found[7].rows.tolist(), found[7].forced


def test_rows_that_do_not_count_allow_any_token() -> None:
    assert masks(Raw(4, 5, 0, 0), [2, 3, 4])[0] == [[4, 4], [5, 5], [-1, -1], [-1, -1]]
    rows, _ = masks(Steps([[2], [3]]), [2, 3, 4])  # behind its end
    assert rows == [[4, 0], [8, 0], [-1, -1], [-1, -1]]


def test_place_where_nothing_is_allowed_fails_with_a_sentence() -> None:
    with pytest.raises(ConstraintFailed, match="allows no token here, not even the end"):
        masks(Raw(0, 1), [2])


def test_matcher_for_which_rows_are_too_narrow_fails_with_its_own_words() -> None:
    class Narrow(AnyToken):
        def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
            raise ValueError(f"{rows.shape[1]} words")

    with pytest.raises(ConstraintFailed, match=r"The grammar failed \(ValueError: 2 words\)"):
        masks(Narrow(), [])


def test_rows_of_all_are_asked_at_once_and_one_that_fails_harms_no_other() -> None:
    class Broken(AnyToken):
        def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
            raise ValueError("no")

    class Silent(Steps):
        def forced(self) -> Sequence[int]:
            raise KeyError("never")

    limits = cast(SchedulerLimits, SimpleNamespace(vocab_size=40, max_drafts=2))
    windows = {
        3: Window(Steps([[2], [3]]), [2, 9]),
        5: Window(Broken(), [1]),
        6: Window(Silent([[1]]), []),
        8: Window(Raw(7, 0, forced=[4]), [1]),
    }
    found, faults = masks_of(windows, limits)
    assert {place: each.rows.tolist() for place, each in found.items()} == {
        3: [[4, 0], [8, 0], [-1, -1]],
        8: [[7, 7], [-1, -1]],
    }
    assert found[8].forced == (4,)
    assert "ValueError: no" in faults[5] and "KeyError: 'never'" in faults[6]


def test_forced_tokens_are_asked_for_where_there_are_drafts_and_as_many_as_can_matter() -> None:
    matcher = Raw(1, forced=range(20))
    assert masks(matcher, [], max_drafts=0)[1] == ()
    assert masks(matcher, [], max_drafts=3)[1] == (0, 1, 2, 3, 4, 5, 6)


def test_forced_draft_was_not_drawn_where_others_were() -> None:
    """Rejection sampling compares with what a draft was drawn from."""
    step = SimpleNamespace(needs=None, column=lambda name: torch.arange(2))
    last = torch.zeros(2, dtype=torch.int64)
    unused = cast(Any, None)
    picks = Picks(unused, unused, cast(Any, step), last, last, wide=3, rejection=True)
    drafts = torch.tensor([[3, 1], [2, 0]])
    assert picks.chances(drafts, 4, None).argmax(2).tolist() == drafts.tolist()
    picks._chances = [torch.full((2, 4), 0.25)] * 2
    certain = torch.tensor([[True, False], [False, False]])
    found = picks.chances(drafts, 4, certain)
    assert found[0, 0].tolist() == [0, 0, 0, 1]
    assert found[certain.logical_not()].eq(0.25).all()


# Requests


def test_each_request_gets_a_matcher_of_its_own(llm: LLM, scripted: Any, recipe: Recipe) -> None:
    llm.generate([[10], [11], [12]], [A, SamplingParams(max_tokens=2), A])
    one, none, other = (request.constraint for request in scripted.requests)
    assert isinstance(one, AnyToken) and isinstance(other, AnyToken) and one is not other
    assert none is None
    assert recipe.compiled == [{"choice": ["a"]}] * 2  # it keeps what it has compiled itself


def test_what_the_recipe_refuses_is_an_error_of_the_request(llm: LLM, recipe: Recipe) -> None:
    bad = SamplingParams(constraint={"regex": "("})
    with pytest.raises(RequestError, match="regex is beyond it") as caught:
        llm.generate([10], bad)
    assert (caught.value.param, caught.value.code) == ("constraint", "unsupported_constraint")
    refused, served = llm.generate([[10], [11]], [bad, A], on_error="output")
    assert refused.error == "regex is beyond it" and refused.error_param == "constraint"
    assert served.token_ids


def test_without_a_recipe_only_requests_with_a_constraint_fail(
    llm: LLM, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def missing(model_type: str, file: Path) -> None:
        asked.append(model_type)
        raise ConfigError("No recipe.")

    monkeypatch.setattr("deepinfer_core.llm.find_recipe", missing)
    with pytest.raises(ConfigError, match=r"No recipe\."):
        llm.generate([[10], [11]], [SamplingParams(max_tokens=1), A])
    asked.clear()
    outputs = llm.generate(
        [[10], [11], [12]], [A, SamplingParams(max_tokens=1), A], on_error="output"
    )
    assert [output.error_code for output in outputs] == ["no_recipe", None, "no_recipe"]
    assert outputs[0].error_param == "constraint" and outputs[1].token_ids == (11,)
    assert asked == ["deepseek_v41"] and scripted.constrained == []
    assert llm.generate([10], SamplingParams(max_tokens=1))[0].token_ids  # nobody asks for one


# Judgement


def spelled(llm: LLM, text: str) -> list[int]:
    return [*llm.encode(text), 1]


def test_finished_text_is_judged(llm: LLM, scripted: Any, recipe: Recipe) -> None:
    texts = iter(["a", "b"])
    scripted.script = lambda request: iter(spelled(llm, next(texts)))
    good, bad = llm.generate([[10], [11]], A)
    assert (good.text, good.constraint_fault, good.constraint_warnings) == ("a", None, ("a note",))
    assert (bad.text, bad.constraint_fault) == ("b", "it is not 'a'")
    assert bad.finish_reason is FinishReason.STOP and bad.error is None
    assert scripted.constrained == ["valid", "invalid"]
    scripted.script = lambda request: iter(spelled(llm, "b"))
    assert list(llm.stream([10], A))[-1].constraint_fault == "it is not 'a'"
    assert llm.generate([10], SamplingParams(max_tokens=9))[0].constraint_fault is None
    assert scripted.constrained == ["valid", "invalid", "invalid"]


@pytest.mark.parametrize(
    ("changes", "script"),
    [
        ({"max_tokens": 1}, "bb"),
        ({"stop": ("b",)}, "abc"),
        ({"stop_token_ids": (70,)}, [70]),
        ({}, [-1]),
    ],
    ids=["cap", "stop string", "stop id", "error"],
)
def test_text_that_was_cut_is_unfinished(
    llm: LLM, scripted: Any, recipe: Recipe, changes: dict[str, Any], script: Any
) -> None:
    ids = spelled(llm, script) if isinstance(script, str) else script
    scripted.script = lambda request: iter(ids)
    params = SamplingParams(**{"max_tokens": 8, "constraint": {"choice": ["x"]}, **changes})
    (output,) = llm.generate([10], params)
    assert output.constraint_fault is None and scripted.constrained == ["unfinished"]


def test_requests_that_are_aborted_are_unfinished(llm: LLM, scripted: Any, recipe: Recipe) -> None:
    stream = llm.stream([10], A)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert scripted.constrained == ["unfinished"]


def test_metrics_count_requests_by_what_became_of_their_text() -> None:
    from deepinfer_core.scheduler.counts import SchedulerCounts
    from deepinfer_core.scheduler.totals import Totals

    metrics = Metrics()
    for result in ("valid", "unfinished", "valid"):
        metrics.observe_constrained(result)
    counts = {name: 0 for name in SchedulerCounts.__dataclass_fields__} | {"blocks": {}}
    family = metrics.snapshot(SchedulerCounts(**counts), Totals())["constrained_requests_total"]
    assert family.values == {("valid",): 2, ("unfinished",): 1} and family.labels == ("result",)


# The command


@pytest.fixture
def run(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, list[dict[str, Any]], str]:
        (tmp_path / "stdin").write_bytes(stdin)
        with (tmp_path / "stdin").open() as file, pytest.raises(SystemExit) as left:
            monkeypatch.setattr(sys, "stdin", file)
            main(["generate", "--model", str(tmp_path / "model"), *arguments])
        out, err = capfd.readouterr()
        return int(left.value.code or 0), [json.loads(line) for line in out.splitlines()], err

    return call


def test_flag_and_lines_state_constraints(run: Any, llm: LLM, scripted: Any, recipe: Any) -> None:
    scripted.script = lambda request: iter(spelled(llm, "b"))
    line = json.dumps({"prompt": "x", "constraint": {"choice": ["b"]}}).encode()
    other = json.dumps({"prompt": "x"}).encode()
    flag = ("--constraint", '{"choice": ["a"]}')
    status, lines, _ = run("-", *flag, stdin=line + b"\n" + other)
    assert status == 0 and recipe.compiled == [{"choice": ["b"]}, {"choice": ["a"]}]
    assert [line.get("constraint_fault") for line in lines] == [None, "it is not 'a'"]
    assert [line["constraint_warnings"] for line in lines] == [["a note"]] * 2


@pytest.mark.parametrize("value", ["{", "[1]", "null", "{}"])
def test_flag_is_a_json_object(run: Any, value: str) -> None:
    status, lines, errors = run("--prompt", "x", "--constraint", value)
    assert status == 2 and not lines and "constraint` is" in errors


# With a model


class Made(ScriptedVerifier):
    """Verifies some of the drafts, by chance."""

    def __init__(self, **given: Any) -> None:
        super().__init__(RandomPlanner(3))


# free, a run without a choice, free again, and the end
IDS = [[*range(50, 90)]] * 3 + [[each] for each in range(60, 72)] + [[*range(20, 29)]] * 2


def written(
    monkeypatch: pytest.MonkeyPatch, verifier: type[Any] | None, **options: Any
) -> tuple[list[tuple[int, ...]], int]:
    """Return the ids of constrained and free requests, and how many rows were decoded."""
    monkeypatch.setattr("deepinfer_core.llm.find_verifier", lambda: verifier)
    small = {"max_model_len": 100, "determinism": "strict", "numerics": "ideal", "num_threads": 1}
    held = SamplingParams(max_tokens=40, temperature=0.9, seed=5, constraint={"ids": IDS})
    free = SamplingParams(max_tokens=6, temperature=0.9, seed=6, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    with LLM(FOLDER, accelerator="cpu", **{**small, **options}) as llm:
        outputs = llm.generate(prompts, [held, free, held])
        assert [output.error for output in outputs] == [None] * 3
        assert outputs[0].finish_reason is FinishReason.STOP
        assert llm.engine.metrics()["constrained_requests_total"].values == {("invalid",): 2}
        return [output.token_ids for output in outputs], llm.engine._scheduler.totals.decode_rows


@pytest.mark.skipif(not FOLDER.exists(), reason="the golden models come with the repository")
def test_constrained_texts_are_those_of_plain_decoding_and_take_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    plain, rows = written(monkeypatch, None, depth=0)
    assert plain[0][3:15] == tuple(range(60, 72)) and len(plain[0]) == len(IDS)
    assert all(token_id in choice for token_id, choice in zip(plain[2], IDS, strict=True))
    assert plain[0] != plain[2]
    for depth, policy in ((0, "fixed"), (1, "fixed"), (2, "delayed")):
        texts, fewer = written(monkeypatch, Made, depth=depth, speculation=policy)
        assert texts == plain, f"depth {depth}, {policy}"
        if policy == "fixed":
            assert fewer <= rows - 2 * 7  # the runs alone save that many
    assert written(monkeypatch, None, depth=2)[0] == plain
