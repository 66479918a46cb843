"""One request on its way through the scheduler: its states and its books.

Two lengths exist and only two: L = `settled_len`, positions whose content the host knows is final,
and U = `planned_len` = L + I, one past the highest position that a launched step may have written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

from deepinfer_core.cache.block_pool import Owner
from deepinfer_core.cache.block_table import BlockTable
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.types import FinishReason, Request

__all__ = ["LIVE", "TRANSITIONS", "Order", "Produced", "Sequence", "State"]


class State(StrEnum):
    """Where a sequence is."""

    NEW = "new"
    WAITING = "waiting"  # holds no blocks and no slot
    PREFILL = "prefill"  # some of its tokens are not computed; holds blocks for U
    RUNNING = "running"  # decodes
    PREEMPTING = "preempting"  # not scheduled any more; keeps blocks until its steps are settled
    FINISHING = "finishing"  # ended; a step launched before may still run (the overrun)
    ABORTING = "aborting"  # the same after an abort or an error; its results are thrown away
    RELEASING = "releasing"  # no step left; resources wait in the release queue
    GONE = "gone"


_ENDS = (State.FINISHING, State.ABORTING)
TRANSITIONS: Mapping[State, tuple[State, ...]] = {
    State.NEW: (State.WAITING,),
    State.WAITING: (State.PREFILL, *_ENDS),
    State.PREFILL: (State.RUNNING, State.PREEMPTING, *_ENDS),
    State.RUNNING: (State.PREEMPTING, *_ENDS),
    State.PREEMPTING: (State.WAITING, *_ENDS),
    State.FINISHING: (State.RELEASING,),
    State.ABORTING: (State.RELEASING,),
    State.RELEASING: (State.GONE,),
    State.GONE: (),
}

LIVE = (State.PREFILL, State.RUNNING, State.PREEMPTING)  # on the device, and results still count

Order = tuple[int, int]  # (-priority, arrival): the first sequence in this order is never preempted


@dataclass(frozen=True, slots=True)
class Produced:
    """What is left of an accepted run after the first stop or cap, and why the request ends."""

    token_ids: Seq[int]
    finish_reason: FinishReason | None


class Sequence:
    """A request and everything the scheduler knows of it. Only `move` changes the state."""

    __slots__ = (
        "arrival",
        "cap",
        "generation",
        "inflight",
        "last_step",
        "num_preemptions",
        "num_unsettled_samples",
        "owner",
        "prompt_len",
        "prompt_logprobs_from",
        "released",
        "request",
        "settled_len",
        "slot",
        "state",
        "table",
        "tail_start",
        "tokens",
        "uid",
        "unsettled",
    )

    def __init__(
        self, request: Request, arrival: int, table: BlockTable, limits: SchedulerLimits
    ) -> None:
        """Make a sequence that nothing was computed of.

        Args:
            request: what to do.
            arrival: grows with every submitted request.
            table: an empty block table.
            limits: for the context length and the window.
        """
        self.request = request
        self.uid = request.uid
        self.prompt_len = prompt_len = len(request.prompt_token_ids)
        self.arrival = arrival
        self.cap = min(request.params.max_tokens, limits.max_model_len - prompt_len)
        # Always of the original prompt: a recompute then repeats the same arithmetic.
        self.tail_start = max(0, prompt_len - limits.window) if request.replay_decoder else 0
        self.tokens = list(request.prompt_token_ids)  # committed: prompt and output
        self.state = State.NEW
        self.generation = -1
        self.num_preemptions = 0
        self.prompt_logprobs_from = 1  # first prompt position not delivered
        self.restart(table)

    def restart(self, table: BlockTable) -> None:
        """Start a new generation: nothing is computed and `table` is empty."""
        self.generation += 1
        self.owner = Owner(self.uid, self.generation)  # of the generation's blocks and slot
        self.table = table
        self.slot: int | None = None
        self.settled_len = 0
        self.inflight = 0
        self.unsettled: deque[int] = deque()
        self.num_unsettled_samples = 0
        self.last_step = 0
        self.released = False

    def move(self, state: State) -> None:
        """Change the state along `TRANSITIONS`."""
        assert state in TRANSITIONS[self.state], (
            f"request {self.request.uid} cannot go from {self.state.value} to {state.value}"
        )
        self.state = state

    @property
    def order(self) -> Order:
        """Place among all sequences: priority first, then arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def planned_len(self) -> int:
        """U: one past the highest position that a launched step may have written."""
        return self.settled_len + self.inflight

    @property
    def num_produced(self) -> int:
        """Tokens of the output that are settled."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced; a sampling step in flight counts as one."""
        return self.cap - self.num_produced - self.num_unsettled_samples

    def produce(self, token_ids: Seq[int]) -> Produced:
        """Commit tokens up to the first stop or cap, in position order."""
        room = self.cap - self.num_produced
        reason = FinishReason.LENGTH if len(token_ids) >= room else None
        kept = token_ids[:room]
        stop_ids = self.request.stop_ids
        for index, token_id in enumerate(kept):
            if token_id in stop_ids:
                kept, reason = kept[: index + 1], FinishReason.STOP
                break
        self.tokens.extend(kept)
        return Produced(kept, reason)
