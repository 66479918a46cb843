"""What a sequence computes after a prefix hit: the arithmetic, and what the model makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_core.bench.make_checkpoint import second_geometry_config, write_checkpoint
from deepinfer_core.cache.swa import ResumePlan, first_late_row, publish_point, resume_plan
from deepinfer_core.testing.runs import ModelRun, Recorder, load_run

BLOCK = 4  # tokens of a block in `load_run`
LENGTH = 60  # tokens of the prompts below
NORMAL = {"replay_encoder": True, "replay_decoder": False, "stored_window": False}
BOTH = {**NORMAL, "replay_decoder": True}
STORED = {"replay_encoder": False, "replay_decoder": False, "stored_window": True}


# The arithmetic


@pytest.mark.parametrize(
    ("hit_len", "num_tokens", "modes", "start", "num_replay", "window_start", "tail_start"),
    [
        (0, 500, NORMAL, 0, 0, 0, 0),
        (0, 500, BOTH, 0, 0, 0, 372),  # the prompt's last 128 rows
        (256, 500, NORMAL, 128, 128, 128, 0),
        (256, 500, BOTH, 128, 128, 128, 372),  # replayed rows skip the late layers
        (448, 500, BOTH, 320, 128, 320, 372),  # rows 372 .. 447 are replayed and run them
        (128, 500, NORMAL, 0, 128, 0, 0),  # a hit of one window: from 0, nothing is cut
        (64, 500, BOTH, 0, 64, 0, 372),
        (576, 600, BOTH, 448, 128, 448, 372),  # after a preemption: above the prompt's tail
        (448, 500, STORED, 448, 0, 0, 0),
        (448, 500, {**STORED, "replay_encoder": True}, 448, 0, 0, 0),
    ],
)
def test_resume_plan(hit_len, num_tokens, modes, start, num_replay, window_start, tail_start):
    plan = resume_plan(hit_len, num_tokens, 500, 128, **modes)
    assert plan == ResumePlan(hit_len, start, num_replay, window_start, tail_start)


def test_replay_is_bounded_and_covers_what_the_tail_needs():
    """For every hit: at most a window of rows, and no late row of the prompt is left out."""
    window, prompt_len = 8, 40
    for hit_len in range(prompt_len):
        plan = resume_plan(hit_len, prompt_len, prompt_len, window, **BOTH)
        assert plan.start + plan.num_replay == hit_len
        assert plan.num_replay == min(window, hit_len)
        assert plan.window_start == plan.start <= plan.tail_start == prompt_len - window


def test_a_hit_leaves_a_token_to_compute():
    with pytest.raises(AssertionError, match="a hit of 8 among 8 tokens"):
        resume_plan(8, 8, 8, 4, **NORMAL)


def test_a_hit_without_windows_needs_replay():
    modes = {**NORMAL, "replay_encoder": False}
    with pytest.raises(AssertionError, match="does not allow replay"):
        resume_plan(4, 8, 8, 4, **modes)
    assert resume_plan(0, 8, 8, 4, **modes).start == 0


@pytest.mark.parametrize(
    ("prompt_len", "point"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (64, 60)]
)
def test_publish_point_is_the_longest_hit_the_same_prompt_can_have(prompt_len, point):
    assert publish_point(prompt_len, 4) == point


# The model. Block KV of the hit lies in blocks of slot 0; the sequence that resumes is in slot 1.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "second"
    write_checkpoint(path, second_geometry_config(), seed=3)
    return path


def prompt(run: ModelRun, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = 3 + len(run.config.eos_token_ids)
    return torch.randint(low, run.config.vocab_size - 1, (LENGTH,), generator=generator)


def plan_for(run: ModelRun, hit_len: int, modes: dict[str, bool]) -> ResumePlan:
    return resume_plan(hit_len, LENGTH, LENGTH, run.config.sliding_window, **modes)


def publish(run: ModelRun, ids: torch.Tensor, hit_len: int) -> dict[object, torch.Tensor]:
    """Compute all of `ids` in slot 0, put the hit's blocks into slot 1's table; return all blocks.

    What the hit's blocks hold is exact; the rest of slot 1's table are its own, empty blocks.
    """
    run.forward(ids)
    for table in run.state.tables.values():
        table[1, : hit_len // BLOCK] = table[0, : hit_len // BLOCK]
    run.tap = Recorder()
    return {
        (pool, layer): source.data.clone()
        for pool, sources in run.state.blocks.items()
        for layer, source in sources.items()
    }


def resume(run: ModelRun, ids: torch.Tensor, plan: ResumePlan, chunks: int = 1) -> torch.Tensor:
    """Run the rows of a plan in slot 1; return the last row's hidden state."""
    model, look_back = run.model, run.config.engram_max_ngram_size - 1
    if model.engram is not None:
        before = ids[max(0, plan.start - look_back) : plan.start]
        run.state.set_history(1, plan.start, model.engram.folded(before, None))
    done, position = None, plan.start
    for part in ids[plan.start :].tensor_split(chunks):
        done = run.forward(
            part,
            start=position,
            slot=1,
            window_floor=plan.window_start,
            write_floor=plan.hit_len,
            tail_start=plan.tail_start or None,
        )
        position += len(part)
    return done.hidden[-1]


def cold(folder: Path, numerics: str, ids: torch.Tensor, tail_start: int) -> torch.Tensor:
    return load_run(folder, numerics).forward(ids, tail_start=tail_start or None).hidden[-1]


@pytest.mark.parametrize("modes", [NORMAL, BOTH, STORED])
@pytest.mark.parametrize("hit_len", [4, 40, 56])
def test_nothing_is_written_at_or_below_the_hit(folder, hit_len, modes):
    run = load_run(folder, "release", num_slots=2)
    ids = prompt(run)
    before = publish(run, ids, hit_len)
    resume(run, ids, plan_for(run, hit_len, modes))
    for (pool, layer), kept in before.items():
        data, table = run.state.blocks[pool][layer].data, run.state.tables[pool].long()
        published, own = table[0], table[1, hit_len // BLOCK : LENGTH // BLOCK]
        assert torch.equal(data[published], kept[published])
        assert not torch.equal(data[own], kept[own]), "rows above the hit write their blocks"


@pytest.mark.parametrize("modes", [NORMAL, BOTH])
def test_replay_is_close_to_a_cold_run_and_closer_than_empty_windows(folder, modes):
    """Measured on six prompts with 28 rows above the hit, as a part of the last row's norm:

    0.2 to 7 % with replay and 10 to 60 % with empty windows; with 12 rows above the hit 3 to 41 %
    and 21 to 82 %. Random weights exaggerate: a row whose routing flips changes as a whole. The
    trained nano model (three texts of 94 to 151 tokens, 10 or 40 rows above the hit): logits change
    by 0 to 5 % with replay, the likeliest token never; by 8 to 56 % with empty windows.
    """
    replayed, empty = [], []
    for seed in range(6):
        run = load_run(folder, "ideal", num_slots=2)
        ids = prompt(run, seed)
        plan = plan_for(run, 32, modes)
        wanted = cold(folder, "ideal", ids, plan.tail_start)
        publish(run, ids, plan.hit_len)
        without = replace(plan, start=plan.hit_len, num_replay=0, window_start=plan.hit_len)
        for each, found in ((plan, replayed), (without, empty)):
            error = (resume(run, ids, each) - wanted).norm() / wanted.norm()
            found.append(error.item())
    assert 0 < max(replayed) < 0.1
    assert sum(replayed) < sum(empty) / 2


@pytest.mark.parametrize("numerics", ["ideal", "release"])
@pytest.mark.parametrize("modes", [NORMAL, BOTH])
@pytest.mark.parametrize("hit_len", [4, 8])  # the window is 8
def test_a_hit_within_the_first_window_is_exact(folder, numerics, modes, hit_len):
    run = load_run(folder, numerics, num_slots=2)
    ids, plan = prompt(run), plan_for(run, hit_len, modes)
    publish(run, ids, hit_len)
    assert torch.equal(resume(run, ids, plan), cold(folder, numerics, ids, plan.tail_start))


@pytest.mark.parametrize("hit_len", [40, 48, 56])
def test_late_layers_run_on_replayed_rows_of_the_tail_and_no_others(folder, hit_len):
    run = load_run(folder, "ideal", num_slots=2)
    ids, plan = prompt(run), plan_for(run, hit_len, BOTH)
    publish(run, ids, hit_len)
    resume(run, ids, plan)
    last_source, late = run.config.last_kv_source, run.config.num_hidden_layers - 1
    assert plan.tail_start == LENGTH - run.config.sliding_window
    assert len(run.tap["hidden", last_source - 1]) == LENGTH - plan.start
    assert len(run.tap["hidden", late]) == LENGTH - plan.tail_start
    replayed_late = max(0, hit_len - plan.tail_start)
    assert replayed_late == {40: 0, 48: 0, 56: 4}[hit_len]
    # without them the rows above the hit would find windows of late layers empty
    without = replace(plan, tail_start=max(plan.tail_start, hit_len))
    same = torch.equal(resume(run, ids, without), resume(run, ids, plan))
    assert same is (replayed_late == 0)


def test_without_decoder_replay_late_layers_run_on_every_replayed_row(folder):
    run = load_run(folder, "ideal", num_slots=2)
    ids, plan = prompt(run), plan_for(run, 40, NORMAL)
    publish(run, ids, 40)
    resume(run, ids, plan)
    assert len(run.tap["hidden", run.config.num_hidden_layers - 1]) == LENGTH - plan.start


@pytest.mark.parametrize("modes", [NORMAL, BOTH])
@pytest.mark.parametrize("chunks", [2, 7])
def test_how_a_replay_is_cut_into_steps_does_not_matter(folder, modes, chunks):
    run = load_run(folder, "release", num_slots=2)
    ids, plan = prompt(run), plan_for(run, 40, modes)
    publish(run, ids, 40)
    assert torch.equal(resume(run, ids, plan, chunks), resume(run, ids, plan))


def test_a_tail_below_the_replay_changes_nothing(folder):
    """After a preemption the hit may lie far behind the prompt, whose tail is then out of sight."""
    run = load_run(folder, "release", num_slots=2)
    ids = prompt(run)
    plan = resume_plan(48, LENGTH, 20, run.config.sliding_window, **BOTH)
    assert 0 < plan.tail_start < plan.start
    publish(run, ids, 48)
    assert torch.equal(resume(run, ids, plan), resume(run, ids, replace(plan, tail_start=0)))


@pytest.mark.parametrize(
    ("stored_tail", "tail_start", "exact"), [(0, 0, True), (52, 52, True), (52, 0, False)]
)
def test_a_stored_window_state_is_exact_where_it_holds_all_that_is_looked_at(
    folder, stored_tail, tail_start, exact
):
    """Decoder-side replay leaves late rows out, which only a sequence with such a tail can miss."""
    run = load_run(folder, "release", num_slots=2)
    ids, point = prompt(run), publish_point(LENGTH, BLOCK)
    window = run.config.sliding_window
    publish(run, ids, point)
    for ring in run.state.windows:
        ring.data[0] = 0
    run.forward(ids[:point], tail_start=stored_tail or None)  # the state after exactly `point`
    for ring in (*run.state.windows, *run.state.carried.values()):
        ring.data[1] = ring.data[0]
    found = resume(run, ids, replace(plan_for(run, point, STORED), tail_start=tail_start))
    assert torch.equal(found, cold(folder, "release", ids, tail_start)) is exact
    assert (stored_tail <= first_late_row(point, tail_start, window)) is exact
