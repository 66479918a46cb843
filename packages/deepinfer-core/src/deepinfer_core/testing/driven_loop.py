"""A scheduler, its loop and a fake device, driven step by step, and all that clients were told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepinfer_core.engine.loop import StepLoop
from deepinfer_core.engine.step_ring import WorkerStepState
from deepinfer_core.interfaces import VerifyPlanner
from deepinfer_core.plans import StepPlan
from deepinfer_core.scheduler import Scheduler, SchedulerLimits
from deepinfer_core.testing.fake_device import FakeDevice
from deepinfer_core.testing.one_by_one import OneByOne
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.testing.virtual_clock import VirtualClock
from deepinfer_core.types import Request, SamplingParams, SequenceUpdate

__all__ = ["VOCAB", "AnyToken", "DrivenLoop", "make_request"]

VOCAB = 50
_FIELDS = frozenset(Request.__dataclass_fields__)


def make_request(uid: int, prompt: int | tuple[int, ...] = 5, **changes: Any) -> Request:
    """Return a request.

    Args:
        uid: its number; also its seed, and `r<uid>` its client id, unless given.
        prompt: its length or its ids.
        changes: fields of `Request`, or else settings.
    """
    fields = {name: changes.pop(name) for name in _FIELDS & changes.keys()}
    ids = tuple((uid * 7 + i) % VOCAB for i in range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 6, **changes})
    named = {"client_id": f"r{uid}", "seed": uid, **fields}
    return Request(uid=uid, prompt_token_ids=ids, params=params, **named)


class AnyToken(OneByOne):
    """A grammar that allows everything; steps with it delay their sampling."""

    done = False

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        """See `TokenConstraint.fill_window`."""
        rows[:] = -1
        return len(drafts)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See `TokenConstraint.accept`."""
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        """See `TokenConstraint.forced`."""
        return ()


class _RecordingDevice(FakeDevice):
    """Keeps the plans it was given."""

    plans: list[StepPlan]

    def launch(self, plan: StepPlan) -> WorkerStepState:
        """See `FakeDevice.launch`."""
        ticket = super().launch(plan)
        self.plans.append(plan)
        return ticket


class DrivenLoop:
    """One rank on a fake device; after every iteration its books are audited.

    Attributes:
        updates: what clients were told, in order.
        requests: uid -> what was submitted.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        depth: int = 2,
        *,
        revoke: Callable[[int], bool] = lambda ticket: False,
        planner: VerifyPlanner | None = None,
        loop: dict[str, Any] | None = None,
        **device: Any,
    ) -> None:
        """Start with nothing to do.

        Args:
            limits: the scheduler's.
            depth: steps that may be unsettled.
            revoke, planner: the scheduler's.
            loop: more arguments of `StepLoop`.
            device: those of `FakeDevice`.
        """
        self.limits, self.clock = limits, VirtualClock()
        self.scheduler = Scheduler(limits, revoke=revoke, planner=planner)
        settings = {"vocab_size": VOCAB, "depth": depth, **device}
        self.device = _RecordingDevice(limits, self.clock, **settings)
        self.device.plans = []
        self.loop = StepLoop(
            self.scheduler, self.device, depth=depth, clock=self.clock.now_ns, **(loop or {})
        )
        self.updates: list[SequenceUpdate] = []
        self.requests: dict[int, Request] = {}

    @property
    def plans(self) -> list[StepPlan]:
        """What was launched."""
        return self.device.plans

    def submit(self, *requests: Request) -> None:
        """Hand requests to the scheduler."""
        for request in requests:
            self.scheduler.submit(request)
            self.requests[request.uid] = request

    def iterate(self, times: int = 1) -> None:
        """Run iterations of the loop."""
        for _ in range(times):
            self.take(self.loop.iterate())

    def take(self, updates: tuple[SequenceUpdate, ...]) -> None:
        """Keep what clients are told, and audit."""
        self.updates += updates
        self.scheduler.audit()

    def run(self, limit: int = 3000) -> None:
        """Iterate until nothing is left to do; all resources are then back."""
        for _ in range(limit):
            if not self.loop.has_work:
                break
            self.iterate()
        assert not self.loop.has_work, f"{limit} iterations do not end it"
        self.audit_idle()

    def audit_idle(self) -> None:
        """Check that nothing is in flight and all is back but for published prefixes.

        Raises:
            AssertionError: something is missing.
        """
        self.scheduler.audit()
        counts = self.scheduler.counts()
        assert counts.inflight_tokens == counts.unsettled_steps == counts.leaving == 0, counts
        assert self.loop.num_unsettled == 0 and self.scheduler.idle, counts
        assert not self.scheduler.scrub(), "something is quarantined"
        # Published blocks stay; the audit has found that nobody refers to them.
        windows = self.scheduler._roster.prefixes.index.num_window_slots
        assert counts.free_slots + windows == self.limits.num_slots + self.limits.num_stored, counts
        for name, total in self.limits.num_blocks.items():
            assert counts.blocks[name]["free"] + counts.blocks[name]["shared"] == total, counts

    def tokens(self, uid: int) -> tuple[int, ...]:
        """Return the tokens a client was told."""
        return tuple(t for u in self.updates if u.uid == uid for t in u.token_ids)

    def end(self, uid: int) -> SequenceUpdate:
        """Return the terminal update of a request, which is the last one of it."""
        mine = [u for u in self.updates if u.uid == uid]
        ends = [u for u in mine if u.finish_reason is not None]
        assert len(ends) == 1, f"request {uid} has {len(ends)} terminal updates"
        assert mine[-1] is ends[0], f"something follows the end of request {uid}"
        return ends[0]

    def expect_reference(self, *uids: int) -> None:
        """Check that requests (all, if none is named) yielded what each of them yields alone."""
        for uid in uids or tuple(self.requests):
            expected = serial_reference(self.requests[uid], self.limits.max_model_len, VOCAB)
            assert (self.tokens(uid), self.end(uid).finish_reason) == expected, f"request {uid}"
