"""One request on its way through the scheduler: its states and its books."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from deepinfer_core.cache.block_pool import Owner
from deepinfer_core.cache.prefix_index import Node
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.lanes import Lanes
from deepinfer_core.types import Request

__all__ = ["LIVE", "TRANSITIONS", "Order", "Sequence", "State"]


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


class Sequence:
    """A request and everything the scheduler knows of it. Only `move` changes the state.

    What changes with every step stands in the lane of its slot; without a slot nothing is computed.
    """

    __slots__ = (
        "arrival",
        "cap",
        "constraint",
        "generation",
        "keeps_to_itself",
        "keys",
        "lanes",
        "node",
        "num_cached",
        "num_preemptions",
        "order",
        "owner",
        "pending_window",
        "prompt_len",
        "prompt_logprobs_from",
        "released",
        "replayed",
        "request",
        "slot",
        "state",
        "tail_start",
        "tokens",
        "uid",
    )

    def __init__(self, request: Request, arrival: int, lanes: Lanes, limits: SchedulerLimits):
        """Make a sequence that nothing was computed of.

        Args:
            request: what to do.
            arrival: grows with every submitted request.
            lanes: columns of all slots.
            limits: for the context length and the window.
        """
        self.request = request
        self.uid = request.uid
        self.prompt_len = prompt_len = len(request.prompt_token_ids)
        self.arrival = arrival
        self.order: Order = (-request.priority, arrival)
        self.lanes = lanes
        self.cap = min(request.params.max_tokens, limits.max_model_len - prompt_len)
        # Always of the original prompt: a recompute then repeats the same arithmetic.
        self.tail_start = max(0, prompt_len - limits.window) if request.replay_decoder else 0
        self.tokens = list(request.prompt_token_ids)  # committed: prompt and output
        self.constraint = request.constraint
        self.keys: list[bytes] = []  # chain keys of the full blocks of `tokens`, as far as needed
        self.keeps_to_itself = False  # takes no part in the prefix index any more
        self.state = State.NEW
        self.generation = -1
        self.num_preemptions = 0
        self.num_cached = 0  # prompt tokens of the first hit
        self.replayed = False
        self.prompt_logprobs_from = 1  # first prompt position not delivered
        self.restart()

    def restart(self) -> None:
        """Start a new generation: nothing is computed."""
        self.generation += 1
        self.owner = Owner(self.uid, self.generation)  # of the generation's blocks and slot
        self.slot: int | None = None
        self.node: Node | None = None  # deepest published prefix that it reads or wrote
        self.pending_window: tuple[int, int] | None = None  # (slot, length) being stored
        self.released = False

    def enter(self, slot: int, max_drafts: int) -> None:
        """Take a slot and start its lane."""
        wanted = self.request.max_drafts
        self.slot = slot
        self.lanes.enter(
            slot,
            uid=self.uid,
            generation=self.generation,
            num_tokens=len(self.tokens),
            limit=self.prompt_len + self.cap,
            max_drafts=max_drafts if wanted is None else min(wanted, max_drafts),
            tail_start=self.tail_start,
            stop_ids=self.request.stop_ids,
            constrained=self.constraint is not None,
            strict=self.request.strict,
        )

    def leave(self) -> None:
        """Give the slot of a reservation back whose step is not launched."""
        assert self.slot is not None, f"request {self.uid} has no slot to leave"
        self.slot = None

    def move(self, state: State) -> None:
        """Change the state along `TRANSITIONS`."""
        assert state in TRANSITIONS[self.state], (
            f"request {self.request.uid} cannot go from {self.state.value} to {state.value}"
        )
        self.state = state
        if self.slot is not None:
            prefilling, running = state is State.PREFILL, state is State.RUNNING
            self.lanes.place(self.slot, live=state in LIVE, prefilling=prefilling, running=running)

    @property
    def settled_len(self) -> int:
        """L: positions whose content the host knows to be final."""
        return 0 if self.slot is None else int(self.lanes.all.settled[self.slot])

    @property
    def planned_len(self) -> int:
        """U: one past the highest position that a launched step may have written."""
        return self.settled_len + self.inflight

    @property
    def inflight(self) -> int:
        """I: tokens that launched steps compute and that are not settled."""
        return 0 if self.slot is None else int(self.lanes.all.inflight[self.slot])

    @property
    def unsettled(self) -> int:
        """Launched steps that contain it and are not settled."""
        return 0 if self.slot is None else int(self.lanes.all.unsettled[self.slot])

    @property
    def last_step(self) -> int:
        """Number of the last launched step that contains it, 0 if there is none."""
        return 0 if self.slot is None else int(self.lanes.all.last_step[self.slot])

    @property
    def num_produced(self) -> int:
        """Tokens of the output that are settled."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced; a sampling step in flight counts as one."""
        samples = 0 if self.slot is None else int(self.lanes.all.samples[self.slot])
        return self.cap - self.num_produced - samples
