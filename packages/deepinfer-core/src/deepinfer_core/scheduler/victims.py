"""Who has to leave when blocks run out."""

from __future__ import annotations

from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.types import FinishReason, SequenceUpdate

__all__ = ["exhausted", "first_live", "is_first_resident", "victim_of"]

EXHAUSTED = (
    "The cache is full: the request has {length} tokens and needs another block, "
    "but it already holds all it can get of the {total} blocks of {size} tokens. Give the engine "
    "more cache or ask for fewer tokens."
)
_VICTIMS = (State.PREFILL, State.RUNNING)


def first_live(roster: Roster) -> Sequence | None:
    """Return the first of all live sequences in order: nothing may stand in its way."""
    candidates = [*roster.resident.values(), *roster.waiting.head(1)]
    return min(candidates, key=lambda s: s.order, default=None)


def is_first_resident(roster: Roster, sequence: Sequence) -> bool:
    """Whether a sequence is the first on the device, which is never preempted."""
    return all(sequence.order <= other.order for other in roster.resident.values())


def victim_of(roster: Roster) -> Sequence | None:
    """Return who has to leave when blocks run out, or None when only one could.

    Lowest priority, then latest arrival. The oldest of each priority is spared while others are
    left; the first in order always is, so that something always gets done.
    """
    resident = (s for s in roster.resident.values() if s.state in _VICTIMS)
    candidates = sorted(resident, key=lambda s: s.order)
    oldest: set[int] = set()
    spared: set[int] = set()
    for sequence in candidates:
        if sequence.request.priority not in oldest:
            oldest.add(sequence.request.priority)
            spared.add(sequence.uid)
    for sequence in reversed(candidates):
        if sequence.uid not in spared:
            return sequence
    return candidates[-1] if len(candidates) > 1 else None


def exhausted(roster: Roster, sequence: Sequence) -> list[SequenceUpdate]:
    """End the only sequence left: nobody can make room for it. Its steps are settled first."""
    if sequence.unsettled:
        return []
    error = EXHAUSTED.format(
        length=len(sequence.tokens), total=roster.pools.num_blocks, size=roster.limits.block_size
    )
    return [roster.end(sequence, FinishReason.ERROR, error, code="cache_exhausted")]
