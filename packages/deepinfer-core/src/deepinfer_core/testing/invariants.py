"""What must hold after every operation on a scheduler, numbered as in its design specification.

Left out are the agreement of a group (I15 to I17) and expert maps (I24), which one rank alone does
not have.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_core.cache.block_table import num_blocks_for
from deepinfer_core.plans import Phase, RowStatus, StepKind
from deepinfer_core.scheduler.chunk_work import ChunkWork
from deepinfer_core.scheduler.sequence import Sequence
from deepinfer_core.testing.invariants_memory import i1, i2, i4, i5, i6, i7, i18, i19, i25
from deepinfer_core.testing.invariants_speculation import budgets, verified
from deepinfer_core.testing.world import World
from deepinfer_core.testing.world_requests import VOCAB
from deepinfer_core.testing.world_watch import Fresh
from deepinfer_core.types import FinishReason

__all__ = ["INVARIANTS", "check", "check_end", "check_flushed"]

STALL_LIMIT = 300  # settled steps within which something has to get further


def i3(world: World) -> None:
    """The device started each good row between L and U, both before the step's reservation."""
    for item in world.fresh.settled:
        rows, result = item.planned.plan.rows, item.result
        good = result.status == RowStatus.OK
        start, upper = result.start + rows.num_replay, rows.start + rows.num_replay
        within = (item.settled <= start) & (start <= upper)
        assert within[good].all(), f"I3: starts {start}, L {item.settled}, U {upper}"


def i8(world: World) -> None:
    """Each row has one source; rows that read a carry read their own, each a different one."""
    for planned in world.fresh.planned:
        sources = [m.source for m in planned.plan.sequences if m.source >= 0]
        assert len(set(sources)) == len(sources), f"I8: two rows read the same carry: {sources}"
        for meta in planned.plan.sequences:
            assert (meta.source >= 0) is (not meta.token_ids), f"I8: sources of {meta}"
            if meta.source >= 0:
                assert planned.previous is not None, f"I8: {meta} reads the carry of no step"
                origin = planned.previous.sequences[meta.source]
                same = (origin.uid, origin.generation) == (meta.uid, meta.generation)
                assert same and origin.samples, f"I8: {meta} reads the carry of {origin}"
                assert meta.phase is Phase.VERIFY, f"I8: a chunk reads a carry: {meta}"


def i9(world: World) -> None:
    """No illegal token id is fed by the host or told to a client."""
    for planned in world.fresh.planned:
        for meta in planned.plan.sequences:
            assert all(0 <= token_id < VOCAB for token_id in meta.token_ids), f"I9: {meta} fed"
    for uid, known in world.unchecked.items():
        assert all(0 <= token_id < VOCAB for token_id in known.output), f"I9: output of {uid}"


def i10(world: World) -> None:
    """Committed tokens only grow, those of the reference, and enter every generation again."""
    for uid, sequence in _live(world):
        known = world.known[uid]
        prompt, produced = known.request.prompt_token_ids, sequence.tokens[sequence.prompt_len :]
        assert tuple(sequence.tokens[: sequence.prompt_len]) == prompt, f"I10: prompt of {uid}"
        assert len(produced) >= known.committed, f"I10: {uid} lost tokens"
        known.committed = len(produced)
        assert tuple(produced) == known.expected[: len(produced)], f"I10: tokens of {uid}"
    for planned in world.fresh.planned:
        for meta in planned.plan.sequences:
            admission, known = meta.admission, world.known[meta.uid]
            if admission is None:
                continue
            tokens = (*known.request.prompt_token_ids, *known.expected)
            first = max(0, meta.start - world.limits.history_len)
            assert admission.history == tokens[first : meta.start], f"I10: history of {meta}"
            if admission.params.uses_penalties:
                count = len(admission.token_ids)
                assert admission.token_ids == tokens[:count], f"I10: tokens of {meta}"
                assert count >= len(known.request.prompt_token_ids) + len(known.output)


def i11(world: World) -> None:
    """Output is a prefix of what is committed, within its cap, and ends at its first stop."""
    for uid, known in world.unchecked.items():
        output = known.output
        assert len(output) <= known.cap, f"I11: {uid} produced {len(output)} tokens"
        assert tuple(output) == known.expected[: len(output)], f"I11: output of {uid}"
        stops = [place for place, token in enumerate(output) if token in known.request.stop_ids]
        assert stops in ([], [len(output) - 1]), f"I11: {uid} goes on after its stop: {output}"
        if stops:
            assert known.ended is not None, f"I11: {uid} has stopped and is live"
    for uid, sequence in _live(world):
        assert len(world.known[uid].output) <= sequence.num_produced, f"I11: {uid} told too much"


def i12(world: World) -> None:
    """Scores of the prompt are told once, in order, and for the whole prompt before any output."""
    for uid, known in world.unchecked.items():
        found, expected = known.prompt_positions, list(known.scores)
        assert found == expected[: len(found)], f"I12: prompt scores of {uid}: {found}"
        if known.output:
            assert found == expected, f"I12: {uid} has output, and prompt scores for {found}"


def i13(world: World) -> None:
    """A request that ended is in none of the containers of live ones, and in no new step."""
    live = {sequence.uid for sequence in world.scheduler._roster.by_client.values()}
    told = set(world.live())
    # an end is in the books before it is told
    assert live <= told, f"I13: {live - told} have ended and are live"


def i14(world: World) -> None:
    """A request that ended by itself yields what it yields alone, for any interleaving."""
    for uid, known in world.unchecked.items():
        if known.ended in (FinishReason.STOP, FinishReason.LENGTH) and not known.cut:
            found = (tuple(known.output), known.ended)
            assert found == (known.expected, known.reason), f"I14: {uid} yields {found}"


def i20(world: World) -> None:
    """A grammar has taken the committed tokens, each once, and nothing after its end."""
    for uid, known in world.unchecked.items():
        if known.grammar is not None:
            assert not known.grammar.violations, f"I20: {uid}: {known.grammar.violations}"
    for uid, sequence in _live(world):
        grammar = world.known[uid].grammar
        if grammar is not None:
            produced = sequence.tokens[sequence.prompt_len :]
            assert grammar.accepted == produced, f"I20: {uid}: {grammar.accepted}, {produced}"


def i21(world: World) -> None:
    """A prefill step is predicted to take its budget at most, but for one smallest chunk or tail.

    Rows and sizes keep their limits too, and one prompt at most stays unfinished.
    """
    limits = world.limits
    for planned in world.fresh.planned:
        if planned.plan.output.kind is StepKind.DECODE:
            continue
        metas = planned.plan.sequences
        assert planned.plan.output.num_rows <= limits.max_step_tokens, f"I21: {planned.plan}"
        sizes = [meta.num_rows - meta.num_replay for meta in metas]
        assert max(sizes) <= limits.max_chunk_tokens, f"I21: {planned.plan}"
        assert sum(meta.phase is Phase.CHUNK for meta in metas) <= 1, "I21: two are unfinished"
        model = planned.before.cost_model
        if model is None:
            continue
        work = ChunkWork()
        for meta, size in zip(metas, sizes, strict=True):
            end = meta.start + meta.num_rows
            tail = max(0, end - max(meta.tail_start, meta.start))
            context = end - size
            work += ChunkWork.of(context, size, replay_rows=meta.num_replay, tail_rows=tail)
        time, budget = model.predict_step(work), limits.step_budget_ns
        smallest = len(metas) == 1 and sizes[0] <= limits.block_size
        absorbed = time * 100 <= budget * 110 and metas[-1].phase is Phase.FINAL_CHUNK
        rounding = len(metas)  # each chunk's time is rounded to ns
        assert time <= budget + rounding or smallest or absorbed, f"I21: {time} of {budget} ns"


def i22(world: World) -> None:
    """Something gets further within some steps, and decoding waits for a few prefills at most."""
    if not (world.squeezed or world.scheduler.paused or world.tickets):
        assert world.stalled < STALL_LIMIT, f"I22: no progress in {world.stalled} steps"
    for planned in world.fresh.planned:
        ballot, limits = planned.before.ballot, world.limits
        held_up = ballot.decode_rows and ballot.prefill_run >= limits.prefill_run_max
        if planned.plan.output.kind is StepKind.PREFILL and held_up:
            each = num_blocks_for(1 + limits.max_drafts, limits.block_size) + 1
            short = planned.before.available < each * ballot.decode_rows
            assert short, (
                f"I22: {ballot.decode_rows} rows wait behind {ballot.prefill_run} prefills"
            )


def _live(world: World) -> list[tuple[int, Sequence]]:
    return [(s.uid, s) for s in world.scheduler._roster.by_client.values()]


INVARIANTS: tuple[Callable[[World], None], ...] = (
    i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i18, i19, i20, i21, i22, i25,
    budgets, verified,
)  # fmt: skip


def check(world: World) -> None:
    """Check all invariants of a moment."""
    for invariant in INVARIANTS:
        invariant(world)
    world.fresh = Fresh()
    for uid in [uid for uid, known in world.unchecked.items() if known.ended is not None]:
        del world.unchecked[uid]


def check_flushed(world: World) -> None:
    """I23: after a flush nothing is in flight, and but for transfers nothing waits for release."""
    scheduler, counts = world.scheduler, world.scheduler.counts()
    assert not world.unsettled and counts.unsettled_steps == 0, "I23: steps are unsettled"
    assert counts.inflight_tokens == 0, f"I23: {counts.inflight_tokens} tokens in flight"
    waiting = {entry.owner for entry in scheduler._roster.releases._entries}
    assert waiting <= {t.owner for t in world.tickets.values()}, f"I23: {waiting} wait"
    if not scheduler.has_requests and not world.tickets:
        assert scheduler.idle, "I23: idle is misjudged"


def check_end(world: World) -> None:
    """I1, I2, I14 and I23 once everything has ended: all told, all free or published."""
    check(world)
    check_flushed(world)
    live = world.live()
    assert not live, f"I13: nothing was told of the end of {live}"
    counts, roster = world.scheduler.counts(), world.scheduler._roster
    assert counts.leaving == counts.waiting == 0, f"I23: {counts}"
    world.scheduler.clear_cache()
    check(world)
    for name, pool in roster.pools.pools.items():
        assert pool.num_free == pool.num_blocks, f"I1: blocks of {name!r} are lost"
    assert roster.slots.num_free == roster.slots.num_blocks, "I1: slots are lost"
