"""One rank's device side: sends a plan, runs the model, samples, hands back a ticket.

All state on the device is written by work on the forward queue, in the order of launches; the host
only sends immutable plans, through a ring of buffers. So no write can overtake an earlier step's
read. `engine/forward.py` is what that work does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer_core.engine.drafting import Drafter
from deepinfer_core.engine.forward import Forward, StepForward
from deepinfer_core.engine.mirror import GrowingMirror, Parts
from deepinfer_core.engine.results import ResultBuffers, StepOutput
from deepinfer_core.engine.sampler import Sampler
from deepinfer_core.engine.stage import (
    FINAL_CHUNK,
    VERIFY,
    StagedStep,
    StepBuffers,
)
from deepinfer_core.engine.step_ring import DeviceTimes, WorkerStepState
from deepinfer_core.engine.verification import Verification
from deepinfer_core.interfaces import Event, KernelBackend, Verifier
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.state import ModelState
from deepinfer_core.plans import Masks, StepPlan, StepResult

__all__ = ["Worker"]

# Steps that can be unsettled, the one that is built, and the one whose clients are being told.
RING_BEYOND_DEPTH = 2


@dataclass
class _Place:
    """One place of the ring: buffers of fixed address, and the step that uses them.

    Attributes:
        staged, forward, output: of that step; they keep what its queues may still read.
        begun, ended: before and behind the step's work on copy-in, forward and copy-out.
        stalled: behind its model and before its sampling, where they were launched apart.
    """

    buffers: StepBuffers
    masks: GrowingMirror
    results: ResultBuffers
    ticket: WorkerStepState | None = None
    staged: StagedStep | None = None
    forward: StepForward | None = None
    output: StepOutput | None = None
    begun: list[Event] = field(default_factory=list)
    ended: list[Event] = field(default_factory=list)
    stalled: list[Event] = field(default_factory=list)

    def take(self) -> None:
        """Make it ready for the next step."""
        if self.ticket is not None:
            events = (self.ticket.forward_done, self.ticket.out_done)
            assert all(event is not None and event.done() for event in events), (
                f"step {self.ticket.plan.output.step_seq} still uses its place in the ring: settle "
                "it before so many more are launched"
            )
        self.ticket = self.staged = self.forward = self.output = None
        self.begun, self.ended, self.stalled = [], [], []

    def collect(self, staged: StagedStep) -> StepResult:
        """Return the result of the step, which must still have this place."""
        assert self.staged is staged, (
            f"the result of step {staged.plan.output.step_seq} was overwritten: collect it before "
            "its place in the ring is used again"
        )
        return self.results.collect(staged)

    def times(self, staged: StagedStep) -> DeviceTimes | None:
        """Return when the step's parts ran; None where that is not known, or not any more."""
        if self.staged is not staged:
            return None
        stamps = [(a.time_ns, b.time_ns) for a, b in zip(self.begun, self.ended, strict=True)]
        known = [(a, b) for a, b in stamps if a is not None and b is not None]
        if len(known) < len(stamps):
            return None
        copy_in, forward, copy_out = known
        stalled = [event.time_ns for event in self.stalled if event.time_ns is not None]
        stalled_ns = stalled[1] - stalled[0] if len(stalled) == 2 else 0
        return DeviceTimes(copy_in, forward, copy_out, stalled_ns)


class Worker:
    """Runs plans on one device.

    Args:
        backend: ops; its runtime's queues carry the work.
        model: weights and forward pass.
        state: caches and slots of all sequences.
        max_rows: most rows of a step, replayed ones included.
        depth: most steps that are unsettled at a time.
        drafter: proposes drafts, or None.
        verifier: chooses which drafts a step verifies where a plan leaves that open; None where no
            plan does.
        rejection: accept drafts by rejection sampling; the verifier does it.
    """

    def __init__(
        self,
        backend: KernelBackend,
        model: DeepseekV41,
        state: ModelState,
        *,
        max_rows: int,
        depth: int = 0,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        rejection: bool = False,
    ):
        """Start with nothing in flight."""
        self.backend, self.model, self.state = backend, model, state
        runtime, sizes = backend.runtime, state.sizes
        # A slot that keeps a stored window now may be a sequence's later.
        num_slots = sizes.num_slots + sizes.num_stored
        self._sampler = Sampler(num_slots, model.config.vocab_size, runtime.device)
        verification = Verification(
            sizes,
            model.config.vocab_size,
            runtime.device,
            self._sampler,
            verifier,
            rejection=rejection,
        )
        self._forward = Forward(backend, model, state, self._sampler, drafter, verification)
        self._copy_in, self._queue = runtime.queue("copy_in"), runtime.queue("forward")
        self._copy_out = runtime.queue("copy_out")
        self._ring = [
            _Place(
                StepBuffers(
                    runtime,
                    sizes,
                    max_rows=max_rows,
                    window=model.config.sliding_window,
                    drafting=drafter is not None,
                ),
                GrowingMirror(runtime, torch.int32),
                ResultBuffers(runtime, sizes, None if drafter is None else drafter.num_drafts),
            )
            for _ in range(depth + RING_BEYOND_DEPTH)
        ]
        runtime.synchronize()  # what was made so far was not made on the queues
        self._num_launched = 0
        self._unsampled: _Place | None = None  # its step waits for masks
        self._launching: _Place | None = None  # left set when a launch is cut off, as by Ctrl-C

    def launch(self, plan: StepPlan) -> WorkerStepState:
        """Queue a step and return its ticket.

        Returns at once where the device has queues of its own, else when the work is done. With
        `plan.output.delays_sampling` all but its sampling is queued.
        """
        self._clear()
        place = self._ring[self._num_launched % len(self._ring)]
        place.take()
        self._launching, number = place, self._num_launched
        self._num_launched += 1
        staged = place.staged = place.buffers.stage(plan, self._sampler)
        place.ticket = ticket = WorkerStepState(
            plan, None, None, lambda: place.collect(staged), lambda: place.times(staged)
        )
        place.begun.append(self._copy_in.record())
        self._copy_in.submit(place.buffers.send)
        sent = self._copy_in.record()
        place.ended.append(sent)
        self._queue.wait_for(sent)
        place.begun.append(self._queue.record())

        def forward() -> None:
            place.forward = self._forward.run(staged, number)

        self._queue.submit(forward)
        if plan.output.delays_sampling:
            place.stalled.append(self._queue.record())
            self._unsampled, self._launching = place, None
        else:
            self._launch_sampling(place, None)
        return ticket

    def launch_sampling(self, ticket: WorkerStepState, masks: Mapping[int, Masks]) -> None:
        """Queue the sampling of a step that delays it; it is the step launched last.

        Args:
            ticket: the step's; its events are set here.
            masks: place in the plan -> what its rows may yield. Other rows may yield any token.
        """
        place = self._unsampled
        assert place is not None and place.ticket is ticket, (
            f"step {ticket.plan.output.step_seq} does not wait for its sampling"
        )
        self._unsampled, self._launching = None, place
        if masks:
            place.masks.fill(_mask_parts(ticket.plan, masks, self.state.sizes.max_drafts))
            self._copy_in.submit(place.masks.send)
            self._queue.wait_for(self._copy_in.record())
        place.stalled.append(self._queue.record())
        self._launch_sampling(place, place.masks if masks else None)

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Zero blocks and slots whose content is not finite, before any later step."""
        self._queue.submit(lambda: self.state.scrub(blocks, slots))

    def close(self) -> None:
        """Wait for all work and end what works in the background; later work starts it anew."""
        try:
            self.backend.runtime.synchronize()
        finally:
            self.backend.runtime.close()
            for place in self._ring:  # a ticket and its place refer to one another
                place.ticket = None

    def _launch_sampling(self, place: _Place, masks: GrowingMirror | None) -> None:
        def sample() -> None:
            assert place.forward is not None
            place.output = self._forward.sample(place.forward, masks)

        def copy_out() -> None:
            assert place.output is not None
            place.results.copy(place.output)

        ticket = place.ticket
        assert ticket is not None
        self._queue.submit(sample)
        ticket.forward_done = self._queue.record()
        self._copy_out.wait_for(ticket.forward_done)
        place.begun.append(self._copy_out.record())
        self._copy_out.submit(copy_out)
        ticket.out_done = self._copy_out.record()
        place.ended += [ticket.forward_done, ticket.out_done]
        self._launching = None

    def _clear(self) -> None:
        """Wait for what was queued of a step whose launch was cut off; nobody has its ticket."""
        if self._unsampled is not None:  # cut off before its sampling
            self._launching, self._unsampled = self._unsampled, None
        if self._launching is None:
            return
        for queue in (self._copy_in, self._queue, self._copy_out):
            with suppress(Exception):  # nobody waits for its result
                queue.record().wait()
        self._launching.ticket = None
        self._launching = None


def _mask_parts(plan: StepPlan, masks: Mapping[int, Masks], num_drafts: int) -> Parts:
    """Return masks [n, words] int32 and their places [n] in [R, 1 + drafts], flattened.

    Where a grammar leaves no choice, `forced` [R, 1 + 2 * drafts] int32, -1 behind the last token.
    """
    rows, wide = plan.rows, 1 + num_drafts
    sampled = np.where(rows.phase == VERIFY, rows.num_rows, rows.phase == FINAL_CHUNK)
    for place, mask in masks.items():
        assert len(mask.rows) == sampled[place], (
            f"sequence {place} of step {plan.output.step_seq} has {len(mask.rows)} masks for "
            f"{sampled[place]} sampled rows"
        )
    numbers = [place * wide + np.arange(len(mask.rows)) for place, mask in masks.items()]
    parts: Parts = {
        "places": np.concatenate(numbers).astype(np.int32),
        "masks": np.concatenate([mask.rows for mask in masks.values()]),
    }
    if num_drafts and any(mask.forced for mask in masks.values()):
        forced = np.full((len(rows), wide + num_drafts), -1, dtype=np.int32)
        for place, mask in masks.items():
            forced[place, : len(mask.forced)] = mask.forced
        parts["forced"] = forced
    return parts
