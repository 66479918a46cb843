"""Sizes of prefill chunks: by time with alignment and short rests, by tokens otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.chunk_work import ChunkWork
from deepinfer_core.scheduler.chunks import ChunkBudget
from deepinfer_core.scheduler.cost_model import CostModel

ROWS = CostModel(k0=0, k1=100, k2=1e-9, k3=0, kt=0)  # 100 ns a row and next to nothing else


def limits(step: int = 512, chunk: int = 512, block: int = 16, window: int = 32) -> SchedulerLimits:
    return SchedulerLimits(
        block_size=block,
        num_blocks={"compressed": 1000},
        num_slots=16,
        max_model_len=100_000,
        max_step_tokens=step,
        max_chunk_tokens=chunk,
        window=window,
    )


@dataclass(frozen=True)
class Waiting:
    """A sequence that has prompt tokens to compute."""

    computed: int
    missing: int
    replay_rows: int
    tail_start: int

    @property
    def prompt_len(self) -> int:
        return self.computed + self.missing


@dataclass(frozen=True)
class Taken:
    """A chunk of the plan, and the time that was predicted before and with it."""

    of: Waiting
    size: int
    before_ns: int
    rows_before: int

    def time(self, model: CostModel, size: int) -> int:
        """Return the predicted time of the plan up to this chunk, had it that size."""
        first = not self.rows_before
        end, low = self.of.computed + size, self.of.computed - self.of.replay_rows
        tail = len(range(max(low, self.of.tail_start), end))
        return self.before_ns + model.predict(
            self.of.computed, size, first=first, replay_rows=self.of.replay_rows, tail_rows=tail
        )


def fill(budget: ChunkBudget, waiting: list[Waiting]) -> list[Taken]:
    """Fill a step as the scheduler does; at most one sequence stays partial."""
    plan: list[Taken] = []
    for each in waiting:
        options = {"replay_rows": each.replay_rows, "tail_start": each.tail_start}
        size = budget.chunk(each.computed, each.missing, each.prompt_len, **options)
        assert 0 <= size <= each.missing
        if not size:
            continue
        plan.append(Taken(each, size, budget.predicted_ns, budget.work.num_rows))
        budget.take(size, each.computed, **options)
        if size < each.missing or budget.spent:
            break
    return plan


@st.composite
def sequences(draw, window: int, unit: int) -> Waiting:
    computed = unit * draw(st.integers(0, 60))
    missing = draw(st.integers(1, 700))
    replay = draw(st.sampled_from([0, 0, min(window, computed)]))
    tail_start = draw(st.sampled_from([0, max(0, computed + missing - window)]))
    return Waiting(computed, missing, replay, tail_start)


@st.composite
def steps(draw) -> tuple[SchedulerLimits, CostModel, int, list[Waiting]]:
    window, unit = draw(st.sampled_from([(32, 16), (32, 4), (8, 16), (0, 2)]))
    rows = draw(st.integers(window + unit, 600))
    chunk = draw(st.integers(unit, 600))
    k2 = draw(st.sampled_from([1e-9, 0.01, 0.5]))
    cost = st.sampled_from([0.0, 1.0, 100.0])
    model = CostModel(draw(cost) * 100, draw(cost), k2, draw(cost) / 10, draw(cost))
    budget = draw(st.integers(1, 60_000))
    waiting = draw(st.lists(sequences(window, unit), min_size=1, max_size=6))
    return limits(rows, chunk, unit, window), model, budget, waiting


def has_short_rest(taken: Taken, size: int, window: int) -> bool:
    return 0 < taken.of.missing - size < window


@given(steps())
def test_plan_keeps_to_its_time_and_rows(step) -> None:
    bounds, model, budget_ns, waiting = step
    budget = ChunkBudget(bounds, model, budget_ns)
    plan = fill(budget, waiting)
    assert plan, "a step always makes progress"
    assert budget.work.num_rows == sum(each.size + each.of.replay_rows for each in plan)
    assert budget.work.num_rows <= bounds.max_step_tokens
    assert max(each.size for each in plan) <= bounds.max_chunk_tokens
    total = plan[-1].time(model, plan[-1].size)
    assert total == budget.predicted_ns
    smallest = len(plan) == 1 and plan[0].size <= bounds.block_size
    absorbs = plan[-1].size == plan[-1].of.missing and total * 10 <= budget_ns * 11
    assert total <= budget_ns or smallest or absorbs
    assert budget.overruns + budget.absorbed == (total > budget_ns)
    assert budget.spent or total < budget_ns


@given(steps())
def test_last_chunk_could_not_be_a_block_larger(step) -> None:
    bounds, model, budget_ns, waiting = step
    last = fill(ChunkBudget(bounds, model, budget_ns), waiting)[-1]
    if last.size == last.of.missing:
        return
    larger = min(last.size + bounds.block_size, last.of.missing)
    rows = last.rows_before + last.of.replay_rows + larger
    assert (
        last.time(model, larger) > budget_ns
        or rows > bounds.max_step_tokens
        or larger > bounds.max_chunk_tokens
        or has_short_rest(last, larger, bounds.window)
    )


@given(steps())
def test_chunk_that_does_not_end_its_prompt_ends_on_a_block_boundary(step) -> None:
    bounds, model, budget_ns, waiting = step
    for each in fill(ChunkBudget(bounds, model, budget_ns), waiting):
        ends = each.size == each.of.missing
        assert ends or (each.of.computed + each.size) % bounds.block_size == 0


@given(steps())
def test_short_rest_is_left_only_where_it_can_be_neither_taken_nor_lengthened(step) -> None:
    bounds, model, budget_ns, waiting = step
    last = fill(ChunkBudget(bounds, model, budget_ns), waiting)[-1]
    if not has_short_rest(last, last.size, bounds.window):
        return
    whole = last.of.missing
    rows = last.rows_before + last.of.replay_rows + whole
    fits = rows <= bounds.max_step_tokens and whole <= bounds.max_chunk_tokens
    assert not fits or last.time(model, whole) * 10 > budget_ns * 11
    tail = min(bounds.window, last.of.prompt_len)
    lengthens = whole - tail >= bounds.block_size and tail <= bounds.max_chunk_tokens
    assert not lengthens or whole - last.size >= tail


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 90), st.integers(1, 40))
def test_without_model_or_budget_tokens_alone_decide(missing, rows, chunk) -> None:
    bounds = limits(rows, chunk)
    for budget in (ChunkBudget(bounds), ChunkBudget(bounds, ROWS, 0), ChunkBudget(bounds, None, 5)):
        left = rows
        for count in missing:
            size = budget.chunk(7, count, 7 + count)
            assert size == min(count, chunk, left)
            budget.take(size, 7)
            left -= size
            assert budget.spent == (not left)
        assert (budget.timed, budget.predicted_ns) == (False, 0)


def test_replayed_rows_count_as_rows_where_tokens_decide() -> None:
    budget = ChunkBudget(limits(step=100))
    assert budget.chunk(64, 500, 564, replay_rows=32) == 68
    budget.take(68, 64, replay_rows=32)
    assert budget.spent


def test_chunk_takes_what_the_time_buys_down_to_a_block() -> None:
    assert ChunkBudget(limits(), ROWS, 10_000).chunk(0, 500, 500) == 96
    assert ChunkBudget(limits(), ROWS, 9_599).chunk(0, 500, 500) == 80


def test_longer_context_makes_chunks_smaller() -> None:
    model = CostModel(k0=1000, k1=100, k2=0.1, k3=1, kt=0)
    sizes = [
        ChunkBudget(limits(), model, 40_000).chunk(context, 5000, context + 5000)
        for context in (0, 512, 1024, 4096)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_chunk_begun_inside_a_block_ends_on_a_boundary() -> None:
    assert ChunkBudget(limits(), ROWS, 5_000).chunk(7, 500, 507) == 41  # 7 + 41 = 3 blocks


def test_first_chunk_takes_a_block_over_the_budget_and_says_so() -> None:
    budget = ChunkBudget(limits(), ROWS, 1)
    assert budget.chunk(16, 500, 516) == 16
    budget.take(16, 16)
    assert (budget.overruns, budget.absorbed, budget.spent) == (1, 0, True)


def test_later_chunk_takes_nothing_over_the_budget() -> None:
    budget = ChunkBudget(limits(), ROWS, 5_000)
    budget.take(40, 0)
    assert budget.chunk(0, 500, 500) == 0
    assert budget.chunk(0, 10, 10) == 10
    assert not budget.spent


def test_short_rest_is_taken_within_a_tenth_over_the_budget() -> None:
    budget = ChunkBudget(limits(), ROWS, 10_000)
    assert budget.chunk(0, 110, 110) == 110
    budget.take(110, 0)
    assert (budget.overruns, budget.absorbed, budget.spent) == (0, 1, True)


def test_short_rest_that_finds_no_room_is_no_reason_to_exceed_the_budget() -> None:
    budget = ChunkBudget(limits(), CostModel(k0=0, k1=10, k2=1e-9, k3=0, kt=0), 1000)
    wish = budget.chunk(0, 105, 105)
    assert wish == 105, "the rest is taken within a tenth over the budget"
    assert budget.chunk(0, 105, 105, most=104) <= 96


def test_short_rest_is_weighed_with_what_the_step_takes_already() -> None:
    budget = ChunkBudget(limits(), ROWS, 10_000)
    budget.take(40, 0)
    assert budget.chunk(0, 70, 70) == 70
    assert budget.chunk(0, 72, 72) == 32


def test_chunk_is_shortened_so_that_the_last_holds_a_window() -> None:
    # 96 tokens are affordable of 111; 15 would be left, so it leaves 111 - 64 = 47
    assert ChunkBudget(limits(), ROWS, 10_000).chunk(0, 111, 111) == 64


def test_prompt_shorter_than_a_window_is_not_shortened_to_nothing() -> None:
    assert ChunkBudget(limits(), ROWS, 1_700).chunk(0, 30, 30) == 16


def test_chunks_shorter_than_a_window_are_not_shortened() -> None:
    assert ChunkBudget(limits(chunk=24, block=8), ROWS, 10_000).chunk(0, 52, 52) == 24


def test_recomputed_output_behind_a_short_prompt_lengthens_no_chunk() -> None:
    assert ChunkBudget(limits(), ROWS, 9_000).chunk(0, 108, 10) == 80


def test_late_layers_count_for_the_rows_that_run_them() -> None:
    model = CostModel(k0=0, k1=100, k2=1e-9, k3=0, kt=100)
    # 100 rows, the last 32 of them at twice the price: 13200 ns
    assert ChunkBudget(limits(), model, 13_200).chunk(0, 100, 100, tail_start=68) == 100
    # Without replay of the decoder all rows cost twice.
    assert ChunkBudget(limits(), model, 13_200).chunk(0, 100, 100, tail_start=0) == 64


def test_replayed_rows_cost_time() -> None:
    assert ChunkBudget(limits(), ROWS, 10_000).chunk(160, 500, 660, replay_rows=32) == 64


def test_work_of_the_plan_adds_up_for_the_online_model() -> None:
    budget = ChunkBudget(limits(), ROWS, 100_000)
    budget.take(32, 64, replay_rows=16, tail_start=70)
    budget.take(10, 0, tail_start=50)
    chunks = (ChunkWork.of(64, 32, replay_rows=16, tail_rows=26), ChunkWork.of(0, 10))
    assert budget.work == chunks[0] + chunks[1]


def test_blocks_larger_than_chunks_do_not_stop_progress() -> None:
    bounds = limits(step=10, chunk=5, block=64)
    assert ChunkBudget(bounds, ROWS, 10_000).chunk(0, 50, 50) == 5
    assert ChunkBudget(bounds, ROWS, 1).chunk(5, 45, 50) == 5
