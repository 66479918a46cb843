"""Differential runs: one trace of requests served in many ways, each of which yields the same bits.

The reference is each request alone, one step at a time, without drafts, with memory for all and
without a cache. All of it runs the real model on the CPU, its queues in threads where steps
overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.runtime import CpuRuntime
from deepinfer_core.engine.drafting import Drafter
from deepinfer_core.engine.loop import StepLoop
from deepinfer_core.engine.worker import Worker
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.state import POOLS, ModelState, StateSizes
from deepinfer_core.scheduler import Scheduler, SchedulerLimits
from deepinfer_core.testing.differential_trace import Layout, Spec, layout_for, trace
from deepinfer_core.testing.differential_variants import Variant
from deepinfer_core.testing.drafters import NgramDrafter, ScriptedDrafter, right_with
from deepinfer_core.testing.planners import RandomPlanner, ScriptedVerifier
from deepinfer_core.types import FinishReason, SequenceUpdate

__all__ = ["Bench", "Outcome", "Report"]

NUM_SLOTS = 8
MAX_ITERATIONS = 20_000
GONE_BEFORE = 3  # iterations after which a client gives up that waits for no token

_RIGHT = {"mixed": 0.7, "right": 1.0, "wrong": 0.0}
_STORED = {"loose": 14, "tight": 3, "least": 2}


@dataclass
class Outcome:
    """What a client was told.

    Attributes:
        gave_up: whether it aborted, and not in the very iteration that told it the end: then that
            was decided before.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    gave_up: bool = field(default=False, compare=False)

    def take(self, update: SequenceUpdate) -> None:
        """Add an update."""
        assert self.finish_reason is None, f"{update} follows the end of its request"
        self.tokens += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.finish_reason, self.error = update.finish_reason, update.error

    def cut_off(self, whole: Outcome) -> bool:
        """Whether it is another outcome up to an abort."""
        count = len(self.tokens)
        return (
            self.finish_reason is FinishReason.ABORT
            and count < len(whole.tokens)
            and self.tokens == whole.tokens[:count]
            and self.logprobs == whole.logprobs[: len(self.logprobs)]
        )


@dataclass
class Report:
    """What a variant did.

    Attributes:
        differences: a sentence for each request that got something else than alone.
        preemptions: sequences taken off the device.
        cold_hits, warm_hits: tokens found in the cache while the trace was served first, and again.
        late_sampling: steps whose sampling waited for masks.
        accepted: drafts that were accepted.
        trimmed: steps that verified fewer drafts than there were.
    """

    variant: Variant
    differences: list[str] = field(default_factory=list)
    preemptions: int = 0
    cold_hits: int = 0
    warm_hits: int = 0
    late_sampling: int = 0
    accepted: int = 0
    trimmed: int = 0


class Bench:
    """Serves the trace and compares; keeps references.

    Args:
        models: numerics -> the model, loaded for them.
    """

    def __init__(self, models: Mapping[str, DeepseekV41]) -> None:
        """Know no reference yet."""
        self._models = models
        self._references: dict[tuple[Layout, str], dict[str, Outcome]] = {}

    def references(self, layout: Layout, numerics: str) -> dict[str, Outcome]:
        """Return what each request yields alone, by name."""
        key = (layout, numerics)
        if key not in self._references:
            found: dict[str, Outcome] = {}
            for spec in trace(layout, grammars=True, aborts=True):
                lone = replace(spec, abort_after=None)
                with _Server(self._models[numerics], Variant(numerics=numerics), layout) as server:
                    found |= server.serve([lone], 0)
            self._references[key] = found
        return self._references[key]

    def run(self, variant: Variant) -> Report:
        """Serve the trace in one way."""
        layout = layout_for(variant.block_size)
        wanted = self.references(layout, variant.numerics)
        specs = trace(layout, grammars=variant.grammars, aborts=variant.company == "abort")
        report = Report(variant)
        model, times = self._models[variant.numerics], 2 if variant.cache == "warm" else 1
        texts = {
            100 * time + place: [*spec.prompt, *wanted[spec.name].tokens]
            for time in range(times)
            for place, spec in enumerate(specs)
        }
        with _Server(model, variant, layout, texts) as server:
            for time in range(times):
                before = server.scheduler.totals.hit_tokens
                found = server.serve(specs, 100 * time)
                hits = server.scheduler.totals.hit_tokens - before
                report.cold_hits, report.warm_hits = (
                    (hits, 0) if time == 0 else (report.cold_hits, hits)
                )
                report.differences += [
                    f"{spec.name} (time {time}): {found[spec.name]} instead of {wanted[spec.name]}"
                    for spec in specs
                    if not _same(found[spec.name], wanted[spec.name])
                ]
            totals = server.scheduler.totals
            report.preemptions, report.late_sampling = totals.preemptions, server.late_sampling
            report.accepted = totals.yielded_tokens - totals.decode_rows
            report.trimmed = server.trimmed
        return report


def _same(found: Outcome, wanted: Outcome) -> bool:
    return found.cut_off(wanted) if found.gave_up else found == wanted


class _Server:
    """One rank, as an engine has it, for one variant; audited after every iteration."""

    def __init__(
        self,
        model: DeepseekV41,
        variant: Variant,
        layout: Layout,
        texts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._variant, self._vocab_size = variant, model.config.vocab_size
        self._runtime = CpuRuntime(threads=variant.depth > 0)
        backend = CpuBackend(variant.numerics, True, self._runtime)
        cached = variant.cache != "off"
        sizes = StateSizes(
            NUM_SLOTS, {}, variant.block_size, layout.max_model_len, variant.gamma,
            _STORED[variant.pool] if cached else 0,
        )  # fmt: skip
        loose = NUM_SLOTS * sizes.table_len * 2
        count = {"tight": layout.tight, "least": layout.least}.get(variant.pool, loose)
        sizes = replace(sizes, num_blocks=dict.fromkeys(POOLS, count))
        chunk = _chunk(variant, layout)
        self._limits = SchedulerLimits(
            block_size=variant.block_size,
            num_blocks=sizes.num_blocks,
            num_slots=NUM_SLOTS,
            max_model_len=layout.max_model_len,
            max_step_tokens=chunk,
            max_chunk_tokens=chunk,
            window=model.config.sliding_window,
            history_len=max(model.config.engram_max_ngram_size - 1, 0),
            max_drafts=variant.gamma,
            num_stored=sizes.num_stored,
            prefix_cache=cached,
            vocab_size=self._vocab_size,
            growth_permille=0,  # admit whoever fits now: that makes a tight pool preempt
        )
        verifier = None
        if variant.lengths == "some":
            tier = 1 if variant.company == "alone" else 1 + variant.depth
            verifier = ScriptedVerifier(RandomPlanner(variant.gamma, tier))
        worker = Worker(
            backend,
            model,
            ModelState.allocate(model.config, backend, sizes),
            max_rows=max(chunk, NUM_SLOTS * (1 + variant.gamma)),
            depth=variant.depth,
            drafter=_drafter(variant, self._vocab_size, sizes, backend, texts or {}),
            verifier=verifier,
        )
        self.scheduler = Scheduler(
            self._limits, planner=None if verifier is None else verifier.planner
        )
        self.loop = StepLoop(self.scheduler, worker, depth=variant.depth)
        self.late_sampling = self.trimmed = 0
        self._count_steps(worker)

    def __enter__(self) -> _Server:
        """Return itself; leaving checks that everything was given back."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End the threads, and audit if nothing else went wrong."""
        try:
            if error is None:
                self._audit_idle()
        finally:
            self._runtime.close()

    def serve(self, specs: Sequence[Spec], first_uid: int) -> dict[str, Outcome]:
        """Serve requests, one after another if the variant says so; what each got, by name."""
        if self._variant.company == "alone":
            found: dict[str, Outcome] = {}
            for place, spec in enumerate(specs):
                found |= self._serve([spec], first_uid + place)
            return found
        return self._serve(specs, first_uid)

    def _serve(self, specs: Sequence[Spec], first_uid: int) -> dict[str, Outcome]:
        outcomes = [Outcome() for _ in specs]
        requests = [
            spec.request(first_uid + place, self._vocab_size) for place, spec in enumerate(specs)
        ]
        for request in requests:
            self.scheduler.submit(request)
        for iteration in range(MAX_ITERATIONS):
            asked_now = []
            for spec, request, outcome in zip(specs, requests, outcomes, strict=True):
                if not outcome.gave_up and _gives_up(spec, outcome, iteration):
                    outcome.gave_up = True
                    asked_now.append(outcome)
                    self.loop.post(partial(self.scheduler.abort, request.client_id))
            if not self.loop.has_work:
                break
            for update in self.loop.iterate():
                outcomes[update.uid - first_uid].take(update)
            for outcome in asked_now:
                if outcome.finish_reason not in (None, FinishReason.ABORT):
                    outcome.gave_up = False
            self.scheduler.audit()
        assert not self.loop.has_work, f"{MAX_ITERATIONS} iterations do not end it"
        return {spec.name: outcome for spec, outcome in zip(specs, outcomes, strict=True)}

    def _count_steps(self, worker: Worker) -> None:
        launch, launch_sampling = worker.launch, worker.launch_sampling

        def launched(plan):  # type: ignore[no-untyped-def]
            self.trimmed += plan.trims
            return launch(plan)

        def sampled(ticket, masks) -> None:  # type: ignore[no-untyped-def]
            self.late_sampling += 1
            launch_sampling(ticket, masks)

        worker.launch = launched  # type: ignore[method-assign]
        worker.launch_sampling = sampled  # type: ignore[method-assign]

    def _audit_idle(self) -> None:
        """Check that nothing is in flight, and that only the cache held anything."""
        counts = self.scheduler.counts()
        assert counts.inflight_tokens == counts.unsettled_steps == counts.leaving == 0, counts
        assert self.loop.num_unsettled == 0 and self.scheduler.idle, counts
        self.scheduler.clear_cache()
        counts = self.scheduler.counts()
        assert counts.free_slots == self._limits.num_slots + self._limits.num_stored, counts
        for name, total in self._limits.num_blocks.items():
            assert counts.blocks[name]["free"] == total, counts


def _gives_up(spec: Spec, outcome: Outcome, iteration: int) -> bool:
    if spec.abort_after is None or outcome.finish_reason is not None:
        return False
    if spec.abort_after == 0:
        return iteration >= GONE_BEFORE
    return len(outcome.tokens) >= spec.abort_after


def _chunk(variant: Variant, layout: Layout) -> int:
    odd = (7 + layout.pad // 4) | 1
    sizes = {"block": variant.block_size, "odd": odd, "half": layout.max_model_len // 2}
    return sizes.get(variant.chunk, layout.max_model_len * NUM_SLOTS)


def _drafter(
    variant: Variant,
    vocab_size: int,
    sizes: StateSizes,
    backend: CpuBackend,
    texts: Mapping[int, Sequence[int]],
) -> Drafter | None:
    if variant.drafter == "none":
        return None
    if variant.drafter == "ngram":
        return NgramDrafter(variant.gamma, sizes, backend.runtime.device)
    right = right_with(_RIGHT[variant.drafter])
    confidence = _say if variant.lengths == "some" else None
    return ScriptedDrafter(variant.gamma, vocab_size, texts, right, confidence)


def _say(uid: int, position: int) -> float:
    """Return what a script says of a draft: one of five logits, so that ties are common."""
    return float((uid * 31 + position * 7) % 5 - 1)
