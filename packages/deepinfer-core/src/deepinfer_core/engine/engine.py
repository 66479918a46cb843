"""The engine of one rank: a model, its memory, and the loop that runs requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer

from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.dspark import DsparkDrafter
from deepinfer_core.engine.interrupt import undivided
from deepinfer_core.engine.loop import StepLoop
from deepinfer_core.engine.memory import MemoryPlan, plan_memory
from deepinfer_core.engine.records import StepRecord, StepRecords
from deepinfer_core.engine.speculation import plan_speculation
from deepinfer_core.engine.worker import Worker
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.metrics import Family
from deepinfer_core.model.checkpoint import Checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.engram import EngramHash
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import load_weights
from deepinfer_core.plans import StepKind
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.cost_model import CostModel
from deepinfer_core.scheduler.counts import SchedulerCounts
from deepinfer_core.scheduler.scheduler import Scheduler
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.types import FinishReason, Request, SequenceUpdate

__all__ = ["Engine", "EngineStats", "build_engine", "set_threads"]

ResultT = TypeVar("ResultT")

# Below this hidden size an op is done before a second thread wakes up. Demo model, two cores: 12
# tokens/s with one thread; with two, 10 when idle and below 1 when something else runs.
SMALL_HIDDEN = 1024


@dataclass
class EngineStats:
    """Totals since the engine started. Times are of the wall, each step's from when it could run.

    A step can run once it is planned and the step before it is settled.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0


class Engine:
    """Requests in, updates out; owns the loop, and by it scheduler and worker of one rank.

    Use it from one thread; others reach it through `post`.
    """

    def __init__(self, model_config: ModelConfig, memory: MemoryPlan, loop: StepLoop):
        """Take over the parts that `build_engine` made."""
        self.model_config, self.memory = model_config, memory
        self.limits = loop.scheduler.limits
        self.stats = EngineStats()
        self._loop, self._scheduler = loop, loop.scheduler
        self._untold: list[SequenceUpdate] = []  # what a flush between steps brought to light
        self._counted = 0  # number of the last step in the stats
        self._counted_ns = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is live or an update not fetched."""
        return bool(self._untold) or self._loop.has_work

    @property
    def counts(self) -> SchedulerCounts:
        """How many requests and blocks are where."""
        return self._scheduler.counts()

    @property
    def records(self) -> StepRecords:
        """The last steps and their times."""
        return self._loop.records

    def metrics(self) -> Mapping[str, Family]:
        """Return all counters of the rank as they are now: of loop, scheduler and watchdog."""
        loop, scheduler = self._loop, self._scheduler
        return loop.metrics.snapshot(scheduler.counts(), scheduler.totals, loop.watchdog)

    def observe_constrained(self, result: str) -> None:
        """Count a request with a constraint: `valid`, `invalid` or `unfinished`."""
        self._loop.metrics.observe_constrained(result)

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            RequestError: it can never run.
            DuplicateRequest: its client id is in use.
        """
        self._scheduler.submit(request)

    def abort(self, client_id: str) -> bool:
        """End a request at once; False when no live request has this id."""
        found = self._scheduler.abort(client_id)
        self._settle_down()
        return found

    def finish(self, uid: int, reason: FinishReason) -> None:
        """End a request whose text is complete, such as by a stop string. No update follows."""
        self._scheduler.finish(uid, reason)
        self._settle_down()

    def post(self, message: Callable[[], ResultT]) -> Future[ResultT]:
        """Let the loop call `message` before it plans the next step; from any thread.

        Returns:
            What the call returns or raises, once it was made.
        """
        return self._loop.post(message)

    def step(self) -> tuple[SequenceUpdate, ...]:
        """Run one iteration of the loop; returns what became known of requests.

        A device error ends the requests of its step, and of a step launched behind it, each with an
        error; the others go on. Ctrl-C is held back until the iteration is over.

        Raises:
            StuckStep: a step did not end in time; the engine is of no use afterwards.
        """
        try:
            with undivided():
                updates = self._loop.iterate() if self._loop.has_work else ()
        finally:
            self._count()
        untold, self._untold = self._untold, []
        return (*untold, *updates)

    def watch(self, watcher: Callable[[StepRecord, Settlement], None] | None) -> None:
        """Call `watcher` for each step whose clients were told, in order; None ends that."""
        self._loop.watcher = watcher

    def audit(self) -> None:
        """Check the books of blocks, slots and tokens in flight.

        Raises:
            AssertionError: they differ; it says where.
        """
        self._scheduler.audit()

    def clear_cache(self) -> None:
        """Forget every published prefix that no request uses."""
        self._scheduler.clear_cache()

    def close(self) -> None:
        """Wait for the device; the engine is not used afterwards."""
        self._loop.flush()
        self._loop.worker.close()

    def _settle_down(self) -> None:
        """Leave nothing in flight when nobody waits for it."""
        if not self._scheduler.has_requests and self._loop.num_unsettled:
            self._untold += self._loop.flush()

    def _count(self) -> None:
        """Add the steps that were settled since the last call."""
        stats = self.stats
        stats.preemptions = self._scheduler.totals.preemptions
        for record in self._loop.records.last(4):
            if record.step_seq <= self._counted or not record.settle_end_ns:
                continue
            self._counted = record.step_seq
            began = max(self._counted_ns, record.built_ns)
            self._counted_ns = record.settle_end_ns
            seconds = (record.settle_end_ns - began) * 1e-9
            stats.steps += 1
            if record.kind is StepKind.PREFILL:
                stats.prefill_tokens += record.num_rows
                stats.prefill_seconds += seconds
            else:
                stats.decode_seconds += seconds
        stats.decode_tokens = self._scheduler.totals.yielded_tokens


def build_engine(
    config: EngineConfig,
    backend: KernelBackend,
    folder: Path,
    tokenizer: Tokenizer | None,
    verifier_class: type[Any] | None = None,
) -> Engine:
    """Load a model folder and make everything a rank needs.

    Args:
        config: options.
        backend: ops of the device.
        folder: the model.
        tokenizer: that of the folder; Engram's hashes are made of it.
        verifier_class: makes what chooses and accepts drafts; None where none is installed.

    Raises:
        ConfigError: `config.json`, `tokenizer.json` or an option does not fit.
        CheckpointError: the weights cannot be used.
    """
    model_config = ModelConfig.from_folder(folder)
    cost_model = None if config.cost_model is None else CostModel.load(config.cost_model)
    set_threads(model_config, config, backend)
    speculation = plan_speculation(config, model_config, backend, folder, verifier_class)
    num_drafts = 0 if speculation is None else speculation.num_drafts
    engram = EngramHash.of_folder(model_config, folder, tokenizer, backend.runtime.device)
    with Checkpoint.open(folder, model_config) as checkpoint:
        # before reading what will not fit
        plan_memory(model_config, config, backend, num_drafts=num_drafts).check()
        weights = load_weights(checkpoint, model_config, backend, drafter=num_drafts > 0)
    memory = plan_memory(model_config, config, backend, num_drafts=num_drafts, weights_loaded=True)
    memory.check()
    state = ModelState.allocate(model_config, backend, memory.sizes, drafter=num_drafts > 0)
    model = DeepseekV41(model_config, weights, engram, backend.runtime.device)
    drafter = verifier = None
    if speculation is not None:
        assert model.drafter is not None, "the weights were read with the drafter's"
        drafter, verifier = DsparkDrafter(model.drafter, state, num_drafts), speculation.verifier
    scheduler = Scheduler(
        _limits(model_config, config, memory),
        cost_model,
        planner=None if verifier is None else verifier.planner,
    )
    backend.runtime.set_background(config.depth > 0)
    max_rows = max(config.max_step_tokens, memory.sizes.num_slots * (1 + memory.sizes.max_drafts))
    worker = Worker(
        backend,
        model,
        state,
        max_rows=max_rows,
        depth=config.depth,
        drafter=drafter,
        verifier=verifier,
        rejection=speculation is not None and speculation.rejection,
    )
    return Engine(model_config, memory, StepLoop(scheduler, worker, depth=config.depth))


def set_threads(model: ModelConfig, config: EngineConfig, backend: KernelBackend) -> None:
    """Set the number of threads of the CPU backend, for the whole process."""
    if backend.runtime.device.type != "cpu":
        return
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif model.hidden_size < SMALL_HIDDEN:
        torch.set_num_threads(1)


def _limits(model: ModelConfig, config: EngineConfig, memory: MemoryPlan) -> SchedulerLimits:
    sizes = memory.sizes
    return SchedulerLimits(
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        num_slots=sizes.num_slots,
        max_model_len=sizes.max_len,
        max_step_tokens=config.max_step_tokens,
        max_chunk_tokens=config.max_step_tokens,
        window=model.sliding_window,
        history_len=max(model.engram_max_ngram_size - 1, 0),
        max_drafts=sizes.max_drafts,
        num_stored=sizes.num_stored,
        prefill_run_max=config.prefill_run_max,
        prefix_cache=config.prefix_cache,
        step_budget_ns=round((config.step_budget_ms or 0) * 1e6),
        vocab_size=model.vocab_size,
    )
