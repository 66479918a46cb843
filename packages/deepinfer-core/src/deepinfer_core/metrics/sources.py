"""What other parts of the engine count, as families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from deepinfer_core.metrics.families import Family, FamilyKind, Labels, counter, gauge, label

if TYPE_CHECKING:
    from deepinfer_core.engine.watchdog import Watchdog
    from deepinfer_core.scheduler.counts import SchedulerCounts

__all__ = ["of_counts", "of_totals", "of_watchdog"]

# The scheduler's totals: name -> help, and the label of those that are counted by something.
_TOTALS = {
    "preemptions": ("Sequences taken off the device.", ""),
    "recomputed_tokens": ("Positions given up by preemptions.", ""),
    "aborts": ("Requests ended by their clients.", ""),
    "rollback_tokens": ("Rows of decode steps whose tokens did not count.", ""),
    "overrun_tokens": ("Rows in flight of requests that had ended.", ""),
    "decode_rows": ("Sequences in decode steps.", ""),
    "verified_tokens": ("Drafts in decode steps.", ""),
    "yielded_tokens": ("Tokens that decode steps gave.", ""),
    "prompt_tokens": ("Prompt positions of admitted requests.", ""),
    "hit_tokens": ("Prompt positions found in the prefix cache.", ""),
    "replayed_tokens": ("Rows that only rebuilt windows after a hit.", ""),
    "chunk_tokens": ("Rows of all chunks of prompts.", ""),
    "chunk_overruns": ("Prefill steps planned over their time budget.", ""),
    "predicted_ns": ("Time that prefill steps sized by time were to take.", ""),
    "measured_ns": ("Time that they took.", ""),
    "failed_builds": ("Steps given up while they were built.", ""),
    "row_status": ("Sequences in steps that the sampler did not find in order.", "kind"),
}


def of_counts(counts: SchedulerCounts) -> dict[str, Family]:
    """Return how many requests and blocks are where."""
    states = ("waiting", "prefilling", "running", "leaving")
    return {
        "requests": Family(
            FamilyKind.GAUGE,
            "Requests by what they do.",
            ("state",),
            {(state,): getattr(counts, state) for state in states},
        ),
        "total_inflight_tokens": gauge(counts.inflight_tokens, "Rows of unsettled steps."),
        "unsettled_steps": gauge(counts.unsettled_steps, "Launched steps that are not settled."),
        "free_slots": gauge(counts.free_slots, "Slots that can be taken now."),
        "pending_free_blocks": gauge(
            counts.pending_free, "Blocks that come back without another preemption."
        ),
        "deferred_age_steps": gauge(
            counts.oldest_deferred, "Steps since the fence of the oldest deferred release."
        ),
        "published_blocks": counter(counts.published_blocks, "Blocks put into the prefix cache."),
        "evicted_blocks": counter(counts.evicted_blocks, "Blocks taken out of the prefix cache."),
        "kv_blocks": Family(
            FamilyKind.GAUGE,
            "Blocks of each pool by state.",
            ("pool", "state"),
            {
                (pool, label(state)): num
                for pool, states_of in counts.blocks.items()
                for state, num in states_of.items()
            },
        ),
    }


def of_totals(totals: object) -> dict[str, Family]:
    """Return a family for each field of a dataclass of counts; a mapping's keys are its label."""
    assert is_dataclass(totals) and not isinstance(totals, type), f"totals are {totals!r}"
    found = {}
    for each in fields(totals):
        value = getattr(totals, each.name)
        text, by = _TOTALS.get(each.name, (each.name.replace("_", " ").capitalize() + ".", "of"))
        labelled = isinstance(value, Mapping)
        values: dict[Labels, int] = (
            {(label(key),): num for key, num in value.items()} if labelled else {(): value}
        )
        labels = (by,) if labelled else ()
        found[each.name] = Family(FamilyKind.COUNTER, text, labels, values)
    return found


def of_watchdog(watchdog: Watchdog) -> dict[str, Family]:
    """Return what the watchdog saw."""
    totals = (
        ("watchdog_near_miss", watchdog.near_misses, "Steps that took half their deadline."),
        ("host_stalls", watchdog.stalls, "Iterations with more than 100 ms of the host's own."),
        ("no_progress", watchdog.violations, "Long runs of steps that brought nothing new."),
    )
    return {name: Family(FamilyKind.COUNTER, text, (), {(): value}) for name, value, text in totals}
