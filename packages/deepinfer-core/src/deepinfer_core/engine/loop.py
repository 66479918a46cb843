"""The engine's loop: plan a step, launch it, settle it.

Serial for now: a step is settled before the next plan.

plan   = scheduler.plan()           CPU decision
ticket = worker.launch(plan)        device work queued
scheduler.settle(plan, ticket.result())
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.memory import MemoryPlan, plan_memory
from deepinfer_core.engine.step_ring import StepRing
from deepinfer_core.engine.worker import Worker
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.checkpoint import Checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.engram import EngramHash
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import load_weights
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.scheduler import Scheduler, SchedulerCounts
from deepinfer_core.types import FinishReason, Request, SequenceUpdate, StepKind, StepPlan

__all__ = ["Engine", "EngineStats", "build_engine"]

# Steps that may be unsettled while the next one is planned.
# 0 is the serial loop; more needs the overlapped one.
DEPTH = 0
# Below this hidden size an op is done before a second thread wakes up. Demo model, two cores: 12
# tokens/s with one thread; with two, 10 when idle and below 1 when something else runs.
SMALL_HIDDEN = 1024


@dataclass
class EngineStats:
    """Totals since the engine started. Times are wall time of steps, from plan to settlement."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0


class Engine:
    """Requests in, updates out; owns the scheduler and the worker of one rank.

    Use it from one thread.
    """

    def __init__(
        self, model_config: ModelConfig, memory: MemoryPlan, scheduler: Scheduler, worker: Worker
    ):
        """Take over the parts that `build_engine` made."""
        self.model_config, self.memory = model_config, memory
        self.limits = scheduler.limits
        self.stats = EngineStats()
        self._scheduler, self._worker, self._ring = scheduler, worker, StepRing()

    @property
    def has_work(self) -> bool:
        """Whether a request is live or an update not fetched."""
        return self._scheduler.has_work

    @property
    def counts(self) -> SchedulerCounts:
        """How many requests and blocks are where."""
        return self._scheduler.counts()

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            RequestError: it can never run.
            DuplicateRequest: its client id is in use.
        """
        self._scheduler.submit(request)

    def abort(self, client_id: str) -> bool:
        """End a request at once; False when no live request has this id."""
        return self._scheduler.abort(client_id)

    def finish(self, uid: int, reason: FinishReason) -> None:
        """End a request whose text is complete, such as by a stop string. No update follows."""
        self._scheduler.finish(uid, reason)

    def step(self) -> tuple[SequenceUpdate, ...]:
        """Run one iteration of the loop; returns what became known of requests.

        A device error ends the requests of its step, each with an error; the others go on.
        """
        began = time.perf_counter()
        self._scrub()
        updates: tuple[SequenceUpdate, ...] = ()
        try:
            plan = self._scheduler.plan()
            if plan is None:
                return self._scheduler.pop_updates()
            self._ring.push(self._worker.launch(plan))
            while len(self._ring) > DEPTH:
                updates += self._settle()
        except BaseException as error:  # a fault of ours, or Ctrl-C: the books stay in order
            self._ring.clear()
            self._scheduler.abandon(f"The step was cut off ({type(error).__name__}).", updates)
            raise
        self._count(plan, time.perf_counter() - began)
        return updates

    def audit(self) -> None:
        """Check the books of blocks, slots and tokens in flight.

        Raises:
            AssertionError: they differ; it says where.
        """
        self._scheduler.audit()

    def close(self) -> None:
        """Wait for the device; the engine is not used afterwards."""
        self._worker.backend.runtime.synchronize()

    def _settle(self) -> tuple[SequenceUpdate, ...]:
        ticket = self._ring.pop()
        try:
            result = ticket.result()
        except AssertionError:
            raise  # a fault of ours; nobody should go on as if nothing had happened
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            sentence = f"Step {ticket.plan.output.step_seq} failed on the device ({what})."
            return self._scheduler.fail(ticket.plan, sentence)
        return self._scheduler.settle(ticket.plan, result)

    def _scrub(self) -> None:
        """Zero what requests with non-finite values left behind, and take it back into use."""
        if scrub := self._scheduler.scrub():
            self._worker.scrub(scrub.blocks, scrub.slots)
            self._scheduler.scrubbed(scrub)

    def _count(self, plan: StepPlan, seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.preemptions = self._scheduler.num_preemptions
        if plan.output.kind is StepKind.PREFILL:
            stats.prefill_tokens += plan.output.num_rows
            stats.prefill_seconds += seconds
        else:
            stats.decode_tokens += plan.output.num_rows
            stats.decode_seconds += seconds


def build_engine(
    config: EngineConfig, backend: KernelBackend, folder: Path, tokenizer: Tokenizer | None
) -> Engine:
    """Load a model folder and make everything a rank needs.

    Args:
        config: options.
        backend: ops of the device.
        folder: the model.
        tokenizer: that of the folder; Engram's hashes are made of it.

    Raises:
        ConfigError: `config.json`, `tokenizer.json` or an option does not fit.
        CheckpointError: the weights cannot be used.
    """
    model_config = ModelConfig.from_folder(folder)
    _set_threads(model_config, config, backend)
    engram = EngramHash.of_folder(model_config, folder, tokenizer, backend.runtime.device)
    with Checkpoint.open(folder, model_config) as checkpoint:
        plan_memory(model_config, config, backend).check()  # before reading what will not fit
        weights = load_weights(checkpoint, model_config, backend)
    memory = plan_memory(model_config, config, backend, weights_loaded=True)
    memory.check()
    state = ModelState.allocate(model_config, backend, memory.sizes)
    model = DeepseekV41(model_config, weights, engram, backend.runtime.device)
    scheduler = Scheduler(_limits(model_config, config, memory))
    return Engine(model_config, memory, scheduler, Worker(backend, model, state))


def _set_threads(model: ModelConfig, config: EngineConfig, backend: KernelBackend) -> None:
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
        prefill_run_max=config.prefill_run_max,
    )
