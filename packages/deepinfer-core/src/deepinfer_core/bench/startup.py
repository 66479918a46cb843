"""What starting takes, and what prefill chunks take: the cost model that plans steps by time.

One sequence is computed to the longest context. Then each cell of a grid of contexts and chunks is
run over it again and again; its time depends on where its rows stand, not on what the cache holds.
A cell has two cases, as chunks differ in how many of their rows run the late layers: none in the
middle of a prompt, and a window of them at its end; all of them in strict mode, which replays not.
"""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deepinfer_core.bench.report import check_writable, device_name, print_table, report
from deepinfer_core.bench.whole_texts import open_model
from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.engine import set_threads
from deepinfer_core.engine.memory import plan_memory
from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.loader import find_backend
from deepinfer_core.model import nano
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41, Tail
from deepinfer_core.model.hub import resolve_model
from deepinfer_core.model.state import POOLS, ModelState, StateSizes
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.chunk_work import ChunkWork, Sample
from deepinfer_core.scheduler.chunks import ChunkBudget
from deepinfer_core.scheduler.cost_model import CostModel, Origin

__all__ = ["CONTEXTS", "Case", "Grid", "bench_startup", "cases_of", "chunk_sizes"]

# Enough to tell the parts of the cost apart, and few enough for a small model on two cores to be
# done within a minute.
CONTEXTS = (0, 1024, 3072)
_CHUNK_SHARES = (8, 4, 1)  # of the largest step

_MS = 1e6  # ns


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        contexts: tokens before a chunk; None for `CONTEXTS` as far as the model's context goes.
        chunks: tokens of a chunk; None for parts of `max_step_tokens`.
        repeats: measured runs of each case, after one that warms up.
    """

    contexts: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    repeats: int = 5


@dataclass(frozen=True)
class Case:
    """A chunk that is measured: `size` rows, `late` of them in all layers."""

    context: int
    size: int
    late: int

    @property
    def work(self) -> ChunkWork:
        """What it computes."""
        return ChunkWork.of(self.context, self.size, tail_rows=self.late)


def bench_startup(
    config: EngineConfig,
    grid: Grid,
    *,
    import_ns: int = 0,
    budget_ms: float | None = None,
    save: Path | None = None,
    out: Path | None = None,
) -> CostModel:
    """Measure, print tables and a JSON line, and store the cost model.

    Args:
        config: which model, how it computes, and the sizes of steps and blocks.
        grid: chunks to measure.
        import_ns: what importing this module took.
        budget_ms: time of a step to show the chunks of; none are shown without.
        save: where the model goes that the option `cost_model` names.
        out: file that the JSON line is appended to.

    Raises:
        ConfigError: an option does not fit, or the fit is rejected; nothing is stored then.
        OutputError: the model cannot be written.
    """
    check_writable(save)
    check_writable(out)
    parts = {"import": import_ns}
    bench = _Bench.start(config, grid, parts)
    print_table(("start-up", "ms"), [(name, f"{ns / _MS:.1f}") for name, ns in parts.items()])
    times = bench.measure(grid.repeats)
    samples = [Sample(case.work, ns) for case, ns in times.items()]
    try:
        model = CostModel.fit(samples, _origin())
    except ConfigError:
        _print_times(times, None)
        raise
    _print_times(times, model)
    residual = model.residual_p95(samples)
    names = ("k0", "k1", "k2", "k3", "kt")
    coefficients = dict(zip(names, model.coefficients(), strict=True))
    print_table(("coefficient", "ns"), [(name, f"{ns:.4g}") for name, ns in coefficients.items()])
    print(f"residual p95: {residual:.1%}")
    chunks = {} if budget_ms is None else bench.chunks(model, budget_ms)
    if chunks:
        header = ("context", f"chunk in {budget_ms:g} ms", "predicted ms")
        print_table(header, [(c, size, f"{ns / _MS:.2f}") for c, (size, ns) in chunks.items()])
    if save is not None:
        model.save(save)
        print(f"stored in {save}")
    figures = {
        "model": config.model or nano.NAME,
        "parts_ms": {name: ns / _MS for name, ns in parts.items()},
        "coefficients_ns": coefficients,
        "residual_p95": residual,
        "grid": [
            {"context": c.context, "chunk": c.size, "late": c.late, "ms": ns / _MS}
            for c, ns in times.items()
        ],
        "budget_ms": budget_ms,
        "chunks": {context: size for context, (size, _) in chunks.items()},
    }
    report("startup", figures, out)
    return model


class _Bench:
    """A model with one sequence whose cache is full to the longest context of the grid."""

    def __init__(
        self,
        config: EngineConfig,
        backend: KernelBackend,
        model: DeepseekV41,
        state: ModelState,
        cases: Sequence[Case],
        max_len: int,
    ) -> None:
        self._config, self._backend = config, backend.with_strict(config.determinism == "strict")
        self._model, self._state, self._cases = model, state, cases
        self._max_len = max_len  # of a sequence of the engine
        # the lowest ids are special tokens
        low, high = 8, model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(low, high, (state.sizes.max_len,), generator=generator).to(
            backend.runtime.device
        )

    @classmethod
    def start(cls, config: EngineConfig, grid: Grid, parts: dict[str, int]) -> _Bench:
        """Load the model and compute the longest context; adds to `parts` what each took, in ns."""
        folder = resolve_model(config.model)
        shape = ModelConfig.from_folder(folder)
        backend = find_backend(config.accelerator, config.numerics)
        planned = plan_memory(shape, config, backend).sizes
        cases = cases_of(config, grid, planned.max_len, shape.sliding_window)
        set_threads(shape, config, backend)
        began = time.perf_counter_ns()
        model = open_model(folder, backend)
        backend.runtime.synchronize()
        parts["weights"] = time.perf_counter_ns() - began
        began = time.perf_counter_ns()
        sizes = _one_sequence(planned, max(case.context + case.size for case in cases))
        state = ModelState.allocate(shape, backend, sizes)
        for table in state.tables.values():
            table[0] = torch.arange(sizes.table_len, dtype=table.dtype, device=table.device)
        backend.runtime.synchronize()
        parts["state"] = time.perf_counter_ns() - began
        bench = cls(config, backend, model, state, cases, planned.max_len)
        step = max(case.size for case in cases)
        parts["first step"] = bench._run(Case(0, step, step))
        for start in range(step, sizes.max_len, step):
            bench._run(Case(start, min(step, sizes.max_len - start), 0))
        return bench

    def measure(self, repeats: int) -> dict[Case, int]:
        """Return the median time of each case in ns.

        Round by round: what slows the machine for a while then slows a few runs of every case, and
        not every run of a few. The first round warms up.
        """
        rounds = [[self._run(case) for case in self._cases] for _ in range(repeats + 1)][1:]
        medians = (round(statistics.median(times)) for times in zip(*rounds, strict=True))
        return dict(zip(self._cases, medians, strict=True))

    def chunks(self, model: CostModel, budget_ms: float) -> dict[int, tuple[int, int]]:
        """Return context -> (chunk, its predicted time in ns), of a prompt as long as can be."""
        longest, window = self._max_len, self._model.config.sliding_window
        limits = SchedulerLimits(
            block_size=self._config.block_size,
            num_blocks=self._state.sizes.num_blocks,
            num_slots=1,
            max_model_len=longest,
            max_step_tokens=self._config.max_step_tokens,
            max_chunk_tokens=self._config.max_step_tokens,
            window=window,
        )
        contexts, context = [0], 1024
        while context < longest:
            contexts.append(context)
            context *= 2
        found = {}
        for context in contexts:
            budget = ChunkBudget(limits, model, max(1, round(budget_ms * _MS)))
            tail_start = max(0, longest - window)
            size = budget.chunk(context, longest - context, longest, tail_start=tail_start)
            budget.take(size, context, tail_start=tail_start)
            found[context] = (size, budget.predicted_ns)
        return found

    def _run(self, case: Case) -> int:
        """Run a chunk as a step's forward pass, and return its time in ns."""
        backend, device = self._backend, self._backend.runtime.device
        ids = self._ids[case.context : case.context + case.size]
        tail = None
        if case.late < case.size:
            keep = torch.arange(case.size - case.late, case.size, device=device)
            tail = Tail(keep, torch.full_like(keep, case.context + case.size - case.late))

        @torch.no_grad()
        def forward() -> None:
            rows = RowBatch.build(
                backend,
                [case.size],
                [case.context],
                [0],
                window=self._model.config.sliding_window,
            )
            done = self._model.forward(backend, ids, rows, self._state, tail=tail)
            if case.late:
                self._model.logits(backend, done.hidden[-1:])

        return _timed(backend, forward)


def chunk_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """Return parts of the largest step, ascending."""
    return tuple(sorted({max(1, max_step_tokens // share) for share in _CHUNK_SHARES}))


def cases_of(config: EngineConfig, grid: Grid, max_len: int, window: int) -> list[Case]:
    """Return every case of a grid.

    Args:
        config: for the largest step and the mode.
        max_len: longest sequence, in tokens.
        window: length of attention windows.

    Raises:
        ConfigError: a chunk of the grid does not fit into a step, or ends beyond the context.
    """
    chunks = grid.chunks or chunk_sizes(min(config.max_step_tokens, max_len))
    if max(chunks) > config.max_step_tokens:
        raise ConfigError(
            f"A chunk of the grid is {max(chunks)} tokens, but `max_step_tokens` is "
            f"{config.max_step_tokens}. Leave it out, or raise `max_step_tokens`."
        )
    contexts = grid.contexts
    if contexts is None:
        contexts = tuple(c for c in CONTEXTS if c + max(chunks) <= max_len)
    if max(contexts, default=0) + max(chunks) > max_len:
        raise ConfigError(
            f"The grid has a context of {max(contexts, default=0)} and a chunk of {max(chunks)} "
            f"tokens, but a sequence can be {max_len} tokens long. Choose shorter ones."
        )
    strict = config.determinism == "strict"
    return [
        Case(context, size, late)
        for context in contexts
        for size in chunks
        for late in (0, size if strict else min(window, size))
    ]


def _one_sequence(planned: StateSizes, max_len: int) -> StateSizes:
    """Return the sizes of the engine's state, cut down to one sequence."""
    sizes = replace(planned, num_slots=1, num_stored=0, max_len=max_len)
    return replace(sizes, num_blocks=dict.fromkeys(POOLS, sizes.table_len))


def _timed(backend: KernelBackend, work: Callable[[], None]) -> int:
    """Return the time of work on the forward queue, from its submission to its end, in ns."""
    queue = backend.runtime.queue("forward")
    began = time.perf_counter_ns()
    queue.submit(work)
    queue.record().wait()
    return time.perf_counter_ns() - began


def _origin() -> Origin:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Origin(device_name(), versions, shlex.join(["python", *sys.argv]))


def _print_times(times: dict[Case, int], model: CostModel | None) -> None:
    """Print the measured grid, with predictions if there is a model."""
    header = ["context", "chunk", "late rows", "ms"]
    rows = [[c.context, c.size, c.late, f"{ns / _MS:.2f}"] for c, ns in times.items()]
    if model is not None:
        header += ["predicted/measured"]
        for row, (case, ns) in zip(rows, times.items(), strict=True):
            row.append(f"{model.predict_step(case.work) / ns:.3f}")
    print_table(header, rows)
