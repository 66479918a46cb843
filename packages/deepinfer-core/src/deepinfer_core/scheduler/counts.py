"""How many there are of what at one instant."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_core.cache.block_pool import BlockState
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import State

__all__ = ["SchedulerCounts", "counts_of"]


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """How many there are of what, for metrics.

    Args:
        waiting: requests without blocks.
        prefilling: requests whose tokens are partly computed.
        running: requests that decode.
        leaving: ended or preempted requests with steps in flight.
        unsettled_steps: launched steps without a settled result.
        inflight_tokens: tokens those compute, replayed ones not counted.
        free_slots: slots that can be taken now.
        preemptions: all so far.
        blocks: pool -> state -> number of blocks.
        published_blocks, evicted_blocks: in every pool, all so far.
        pending_free: blocks, in every pool, that come back without another preemption.
        oldest_deferred: steps launched since the fence of the oldest deferred release.
    """

    waiting: int
    prefilling: int
    running: int
    leaving: int
    unsettled_steps: int
    inflight_tokens: int
    free_slots: int
    preemptions: int
    blocks: dict[str, dict[str, int]]
    published_blocks: int
    evicted_blocks: int
    pending_free: int
    oldest_deferred: int


def counts_of(
    roster: Roster, unsettled_steps: int, inflight_tokens: int, last_step: int
) -> SchedulerCounts:
    """Count what is where; `last_step` is the number of the step launched last."""
    states = [s.state for s in roster.resident.values()]
    fence = roster.releases.oldest_fence
    return SchedulerCounts(
        waiting=len(roster.waiting),
        prefilling=states.count(State.PREFILL),
        running=states.count(State.RUNNING),
        leaving=states.count(State.PREEMPTING) + len(roster.leaving),
        unsettled_steps=unsettled_steps,
        inflight_tokens=inflight_tokens,
        free_slots=roster.slots.num_free,
        preemptions=roster.totals.preemptions,
        blocks={
            name: {state.value: pool.count(state) for state in BlockState}
            for name, pool in roster.pools.pools.items()
        },
        published_blocks=roster.prefixes.index.published_blocks,
        evicted_blocks=roster.prefixes.index.evicted_blocks,
        pending_free=roster.pending_free(),
        oldest_deferred=0 if fence is None else last_step - fence,
    )
