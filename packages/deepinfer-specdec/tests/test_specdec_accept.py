"""Acceptance: outcomes by hand, special distributions, the cut at stops and caps."""

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_specdec import (
    Acceptance,
    Rejection,
    TargetNoise,
    VerifyInputError,
    committed_lengths,
)
from deepinfer_specdec.noise import RESIDUAL, TARGET, chances, gumbel


def seeds_of(count: int, seed: int = 0) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).integers(0, 2**32, (count, 2)))


def chances_of(*shape: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).dirichlet([0.5] * shape[-1], shape[:-1])
    return torch.tensor(values, dtype=torch.float32)


# ---- target noise -------------------------------------------------------------------------------


def test_drafts_stand_up_to_the_first_that_differs() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]])
    target = torch.tensor([[1, 2, 3, 4]] * 5)
    lengths = torch.tensor([3, 3, 3, 1, 0], dtype=torch.int32)
    found = TargetNoise().accept(drafts, lengths, target)
    assert found.token_ids.tolist() == [
        [1, 2, 3, 4],
        [1, 2, -1, -1],
        [1, -1, -1, -1],
        [1, 2, -1, -1],
        [1, -1, -1, -1],
    ]
    assert found.num_accepted.tolist() == [3, 1, 0, 1, 0]
    assert found.token_ids.dtype == torch.int64 and found.num_accepted.dtype == torch.int32


def test_what_was_not_verified_does_not_matter() -> None:
    drafts, target = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 4]])
    lengths = torch.tensor([1])
    other_drafts, other_target = drafts.clone(), target.clone()
    other_drafts[0, 1:], other_target[0, 2:] = -1, -1
    a = TargetNoise().accept(drafts, lengths, target)
    b = TargetNoise().accept(other_drafts, lengths, other_target)
    assert a.token_ids.equal(b.token_ids) and a.num_accepted.equal(b.num_accepted)


@pytest.mark.parametrize("acceptor", [TargetNoise(), Rejection()])
def test_no_requests_and_no_drafts_work(acceptor: Rejection) -> None:
    none = torch.zeros(0, 3, dtype=torch.int64)
    found = acceptor.accept(
        none,
        none[:, 0],
        torch.zeros(0, 4, dtype=torch.int64),
        seeds=none[:, :2],
        positions=none[:, 0],
        probabilities=(torch.zeros(0, 3, 7), torch.zeros(0, 4, 7)),
    )
    assert found.token_ids.shape == (0, 4) and found.num_accepted.shape == (0,)
    certain = torch.zeros(2, 1, 7)
    certain[:, :, 5] = 1
    found = acceptor.accept(
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.full((2, 1), 5),
        seeds=seeds_of(2),
        positions=torch.tensor([3, 4]),
        probabilities=(torch.zeros(2, 0, 7), certain),
    )
    assert found.token_ids.tolist() == [[5], [5]]


# ---- rejection ----------------------------------------------------------------------------------


def reject(
    drafts: Tensor,
    lengths: Tensor,
    draft: Tensor,
    target: Tensor,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Acceptance:
    count = len(drafts)
    return Rejection().accept(
        drafts,
        lengths,
        torch.full((count, drafts.shape[1] + 1), -1),
        seeds=seeds_of(count) if seeds is None else seeds,
        positions=torch.arange(count) if positions is None else positions,
        probabilities=(draft, target),
    )


def by_hand(
    drafts: Tensor, lengths: Tensor, draft: Tensor, target: Tensor, seeds: Tensor, positions: Tensor
) -> list[list[int]]:
    """Rejection sampling once more, draft by draft."""
    rows = []
    for r in range(len(drafts)):
        out: list[int] = []
        for k in range(int(lengths[r])):
            place = positions[r, None] + k
            u = float(chances(seeds[r, None], place, 2))
            x = int(drafts[r, k])
            if u < float(target[r, k, x]) / max(float(draft[r, k, x]), 1e-30):
                out.append(x)
                continue
            rest = (target[r, k] - draft[r, k]).clamp(min=0)
            noise = gumbel(seeds[r, None], place, len(rest), RESIDUAL)[0]
            out.append(int((rest.log() + noise).argmax()))
            break
        else:
            k = int(lengths[r])
            noise = gumbel(seeds[r, None], positions[r, None] + k, target.shape[2], TARGET)[0]
            out.append(int((target[r, k].log() + noise).argmax()))
        rows.append(out + [-1] * (drafts.shape[1] + 1 - len(out)))
    return rows


def test_rejection_equals_the_rule_by_hand() -> None:
    draft, target = chances_of(300, 4, 9, seed=1), chances_of(300, 5, 9, seed=2)
    drafts = torch.multinomial(
        draft.flatten(0, 1), 1, generator=torch.Generator().manual_seed(0)
    ).view(300, 4)
    lengths = torch.arange(300) % 5
    seeds, positions = seeds_of(300, 3), torch.arange(300) * 11
    found = reject(drafts, lengths, draft, target, seeds, positions)
    expected = by_hand(drafts, lengths, draft, target, seeds, positions)
    assert found.token_ids.tolist() == expected
    assert found.num_accepted.tolist() == [sum(x >= 0 for x in row) - 1 for row in expected]
    assert len(set(found.num_accepted.tolist())) == 5


def test_greedy_requests_come_out_greedy() -> None:
    best = torch.tensor(np.random.default_rng(0).integers(0, 9, (200, 4)))
    target = torch.nn.functional.one_hot(best, 9).float()
    draft = chances_of(200, 3, 9)
    drafts = torch.tensor(np.random.default_rng(1).integers(0, 9, (200, 3)))
    drafts[:100] = best[:100, :3]
    lengths = torch.arange(200) % 4
    found = reject(drafts, lengths, draft, target)
    greedy = TargetNoise().accept(drafts, lengths, best)
    assert found.token_ids.equal(greedy.token_ids)
    assert found.num_accepted.equal(greedy.num_accepted)


def test_equal_distributions_accept_everything() -> None:
    both = chances_of(2000, 3, 9)
    drafts = torch.multinomial(both[:, :2].flatten(0, 1), 1).view(2000, 2)
    assert reject(drafts, torch.full((2000,), 2), both[:, :2], both).num_accepted.eq(2).all()


def test_disjoint_supports_accept_nothing_and_draw_from_the_target() -> None:
    draft, target = torch.zeros(500, 1, 4), torch.zeros(500, 2, 4)
    draft[:, :, :2], target[:, :, 2:] = 0.5, 0.5
    found = reject(torch.zeros(500, 1, dtype=torch.int64), torch.ones(500), draft, target)
    assert found.num_accepted.eq(0).all()
    assert set(found.token_ids[:, 0].tolist()) == {2, 3}


def test_certain_draft_never_comes_out_of_its_own_residual() -> None:
    draft, target = torch.zeros(2000, 1, 4), torch.full((2000, 2, 4), 0.25)
    draft[:, :, 1] = 1
    found = reject(torch.ones(2000, 1, dtype=torch.int64), torch.ones(2000), draft, target)
    accepted = found.num_accepted == 1
    assert 0.2 < accepted.float().mean() < 0.3
    assert set(found.token_ids[~accepted, 0].tolist()) == {0, 2, 3}


def test_residual_without_mass_draws_from_the_target() -> None:
    # A target that sums to a little less than the draft everywhere, as rounding may leave it.
    draft = torch.full((2000, 1, 4), 0.25)
    target = torch.full((2000, 2, 4), 0.25)
    target[:, 0] = torch.tensor([0.0, 0.0, 0.2, 0.2])
    found = reject(torch.full((2000, 1), 2), torch.ones(2000), draft, target)
    fallen = found.token_ids[found.num_accepted == 0, 0]
    assert len(fallen) > 200
    assert set(fallen.tolist()) == {2, 3}


def test_drafts_that_were_not_verified_have_no_part() -> None:
    draft, target = chances_of(400, 3, 9, seed=1), chances_of(400, 4, 9, seed=2)
    drafts = torch.tensor(np.random.default_rng(0).integers(0, 9, (400, 3)))
    lengths = torch.arange(400) % 4
    unverified = torch.arange(3) >= lengths[:, None]
    other = torch.where(unverified, -1, drafts)
    other_draft = torch.where(unverified[:, :, None], chances_of(400, 3, 9, seed=5), draft)
    behind = torch.arange(4) > lengths[:, None]
    other_target = torch.where(behind[:, :, None], chances_of(400, 4, 9, seed=6), target)
    a = reject(drafts, lengths, draft, target)
    b = reject(other, lengths, other_draft, other_target)
    assert a.token_ids.equal(b.token_ids) and a.num_accepted.equal(b.num_accepted)


def test_outcome_of_a_row_is_the_same_in_any_batch() -> None:
    draft, target = chances_of(40, 3, 9, seed=1), chances_of(40, 4, 9, seed=2)
    drafts = torch.tensor(np.random.default_rng(0).integers(0, 9, (40, 3)))
    lengths, seeds, positions = torch.arange(40) % 4, seeds_of(40), torch.arange(40)
    together = reject(drafts, lengths, draft, target, seeds, positions)
    for r in range(40):
        one = slice(r, r + 1)
        alone = reject(
            drafts[one], lengths[one], draft[one], target[one], seeds[one], positions[one]
        )
        assert alone.token_ids.equal(together.token_ids[one])


def test_missing_and_misshapen_inputs_are_refused() -> None:
    drafts, lengths = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)
    target = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(VerifyInputError, match="needs `seeds`, `positions`, `probabilities`"):
        Rejection().accept(drafts, lengths, target)
    both = dict(seeds=seeds_of(2), positions=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(VerifyInputError, match=r"\(2, 3, 7\) of the draft and \(2, 3, 7\)"):
        Rejection().accept(
            drafts,
            lengths,
            target,
            **both,
            probabilities=(torch.zeros(2, 3, 7), torch.zeros(2, 3, 7)),
        )
    with pytest.raises(VerifyInputError, match=r"float64"):
        Rejection().accept(
            drafts,
            lengths,
            target,
            **both,
            probabilities=(torch.zeros(2, 3, 7), torch.zeros(2, 4, 7, dtype=torch.float64)),
        )
    with pytest.raises(VerifyInputError, match=r"`target` \(2, 3\)"):
        TargetNoise().accept(drafts, lengths, target[:, :3])
    with pytest.raises(VerifyInputError, match=r"int32"):
        TargetNoise().accept(drafts.int(), lengths, target)


# ---- cuts ---------------------------------------------------------------------------------------


def outcome(*rows: list[int]) -> Acceptance:
    width = max(map(len, rows))
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    return Acceptance(padded, torch.tensor([len(row) - 1 for row in rows], dtype=torch.int32))


def test_first_stop_in_the_order_of_positions_ends_a_request() -> None:
    run = outcome([1, 2, 8, 4, 9, 6], [9, 8], [1, 2], [1, 9])
    assert committed_lengths(run, torch.tensor([9, 8])).tolist() == [3, 1, 2, 2]
    assert committed_lengths(run, torch.tensor([], dtype=torch.int64)).tolist() == [6, 2, 2, 2]


def test_cap_does_not_hide_an_earlier_stop() -> None:
    run = outcome([1, 2, 8, 4, 5, 6], [1, 2, 3, 4, 5, 8], [1, 2])
    remaining = torch.tensor([5, 5, 0])
    assert committed_lengths(run, torch.tensor([8]), remaining).tolist() == [3, 5, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_gives_the_same_outcome_and_can_be_captured() -> None:
    draft, target = chances_of(300, 4, 131, seed=1), chances_of(300, 5, 131, seed=2)
    drafts = torch.multinomial(draft.flatten(0, 1), 1).view(300, 4)
    lengths, seeds, positions = torch.arange(300) % 5, seeds_of(300, 3), torch.arange(300) * 11
    expected = reject(drafts, lengths, draft, target, seeds, positions)
    inputs = [each.cuda() for each in (drafts, lengths, draft, target, seeds, positions)]
    found = reject(*inputs)
    # A logarithm may differ in its last bit, so a near tie may fall otherwise.
    assert found.num_accepted.cpu().equal(expected.num_accepted)
    assert (found.token_ids.cpu() == expected.token_ids).float().mean() > 0.999
    own = torch.full((300, 5), -1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Rejection().accept(
            inputs[0],
            inputs[1],
            own,
            seeds=inputs[4],
            positions=inputs[5],
            probabilities=(inputs[2], inputs[3]),
        )
    graph.replay()
    assert captured.token_ids.equal(found.token_ids)


def test_a_draft_that_its_own_distribution_excludes_is_refused() -> None:
    """Such as of a drafter whose values are not finite: it claims no distribution at all."""
    vocab_size = 6
    pt = torch.full((1, 2, vocab_size), 1 / vocab_size)
    pd = torch.zeros(1, 1, vocab_size)
    seen = set()
    for seed in range(40):
        found = Rejection().accept(
            torch.zeros(1, 1, dtype=torch.int64),
            torch.ones(1, dtype=torch.int32),
            torch.zeros(1, 2, dtype=torch.int64),
            seeds=torch.tensor([[seed, 0]]),
            positions=torch.tensor([5]),
            probabilities=(pd, pt),
        )
        assert int(found.num_accepted) == 0
        seen.add(int(found.token_ids[0, 0]))
    assert len(seen) == vocab_size  # the target's own distribution
