"""Accepted lengths of finished texts against decoding step by step, on a small random model."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from deepinfer_core.bench.acceptance import FinishedText, Verified, verify_texts
from deepinfer_core.bench.make_checkpoint import second_geometry_config, write_checkpoint
from deepinfer_core.testing.runs import ModelRun, load_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acceptance") / "model"
    write_checkpoint(folder, second_geometry_config(), seed=3)
    return folder


def step_by_step(
    run: ModelRun, prompt: list[int], slot: int, rng: Random
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Decode with drafts of which `rng` decides how many pass.

    Returns the output, and of each step the number of accepted drafts and the confidence.
    """
    drafter = run.model.drafter
    assert drafter is not None
    run.prefill(prompt, slot=slot)
    output, accepted, confidence = [rng.randrange(5, 60)], [], []
    for wanted in (0, 3, run.config.dspark_block_size, 1):
        position = len(prompt) + len(output) - 1
        with torch.no_grad():
            last = torch.tensor([output[-1]])
            drafted = drafter.draft(run.backend, last, [position], [slot], run.state)
        drafts = drafted.token_ids[0].tolist()
        passing = drafts[:wanted]
        other = [5 if wanted == len(drafts) or drafts[wanted] != 5 else 6]
        run.prefill([output[-1], *passing], start=position, slot=slot)
        output += passing + other
        accepted.append(wanted)
        confidence.append(drafted.confidence[0])
    return output, accepted, confidence


def test_cycles_are_those_of_decoding_step_by_step(folder: Path) -> None:
    rng = Random("acceptance")
    run = load_run(folder, "release", num_slots=3)
    prompts = [[rng.randrange(4, 300) for _ in range(length)] for length in (1, 23, 40)]
    decoded = [step_by_step(run, prompt, slot, rng) for slot, prompt in enumerate(prompts)]
    texts = [
        FinishedText(prompt, output)
        for prompt, (output, _, _) in zip(prompts, decoded, strict=True)
    ]
    found = verify_texts(run.model, run.backend, texts)
    rows = found.cycles()
    assert found.accepted[rows].tolist() == [n for _, counts, _ in decoded for n in counts]
    assert found.text[rows].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    wanted = torch.stack([each for _, _, values in decoded for each in values])
    assert np.array_equal(found.confidence[rows], wanted.numpy())
    assert found.accepted_len() == pytest.approx(
        np.minimum(found.accepted[rows] + 1, found.remaining[rows]).mean()
    )
    assert len(found.text) == sum(len(text.token_ids) - 1 for text in texts)


def test_result_does_not_depend_on_how_texts_are_put_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(folder, "ideal")
    rng = Random("batches")
    texts = [
        FinishedText([rng.randrange(4, 300) for _ in range(3 + i)], list(range(5, 12 + i)))
        for i in range(4)
    ]
    together = verify_texts(run.model, run.backend, texts)
    monkeypatch.setattr("deepinfer_core.bench.whole_texts.MAX_ROWS", 8)
    monkeypatch.setattr("deepinfer_core.bench.acceptance.MAX_BLOCKS", 3)
    apart = verify_texts(run.model, run.backend, texts)
    for name in ("text", "anchor", "remaining", "accepted", "confidence"):
        assert np.array_equal(getattr(together, name), getattr(apart, name)), name


def test_texts_without_an_anchor_have_no_blocks(folder: Path) -> None:
    run = load_run(folder, "ideal")
    found = verify_texts(run.model, run.backend, [FinishedText([5], [6]), FinishedText([5], [])])
    assert found.confidence.shape == (0, run.config.dspark_block_size)
    assert not len(found.cycles()) and np.isnan(found.accepted_len())


def made_up(accepted: list[int], remaining: list[int]) -> Verified:
    count = len(accepted)
    return Verified(
        text=np.zeros(count, dtype=np.int64),
        anchor=np.arange(count),
        remaining=np.array(remaining),
        accepted=np.array(accepted),
        confidence=np.zeros((count, 3), dtype=np.float32),
    )


def test_the_end_of_a_text_cuts_what_a_step_commits() -> None:
    found = made_up([1, 0, 3, 2, 1], [5, 4, 3, 2, 1])
    assert found.cycles().tolist() == [0, 2]
    assert found.accepted_len() == pytest.approx((2 + 3) / 2)
    assert found.complete.tolist() == [True, True, True, False, False]
    assert found.acceptance().tolist() == pytest.approx([4 / 5, 2 / 4, 1 / 3])
