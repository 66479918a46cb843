"""Which kind of step comes next: a pure function of what a rank wants.

Ranks of a group would gather their ballots here and all evaluate the same function; a rank alone
has one ballot.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_core.plans import StepKind

__all__ = ["Ballot", "decide"]


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank could do in the next step.

    Args:
        want_prefill: some prompt is not computed; whether it can be admitted is seen when the step
            is built.
        decode_rows: sequences that could decode.
        prefill_run: prefill steps in a row so far.
    """

    want_prefill: bool
    decode_rows: int
    prefill_run: int


def decide(ballot: Ballot, prefill_run_max: int) -> StepKind:
    """Return the kind of the next step: prefill goes first, but holds decoding up only so long."""
    held_up = ballot.prefill_run >= prefill_run_max and ballot.decode_rows > 0
    return StepKind.PREFILL if ballot.want_prefill and not held_up else StepKind.DECODE
