"""The training loop: steps without a host sync, a log, and pieces that stop and resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nano.training.loader import Batch
from nano.training.optimizer import Optimizer, OptimizerSettings, StepFacts
from nano.training.state import SavedState, StateError, load, round_to_24_bits, save
from nano.training.stepper import Stepper

__all__ = ["Diverged", "LoopSettings", "Phase", "Piece", "Progress", "learning_rate", "run"]


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or gradients that were not finite."""


@dataclass(frozen=True)
class LoopSettings:
    """What decides the result of a phase, saved with it; a piece with others is refused.

    Attributes:
        steps: of the whole phase.
        batch_rows: rows of a batch; for the record, the caller makes the batches.
        seed: of data and weights; for the record, too.
        peak_lr: learning rate between warm-up and decay.
        warmup_steps: the rate rises linearly over these.
        decay_steps: the rate falls linearly to 0 over the last so many.
        log_every: steps between two stops of the loop: only there the host waits for the device,
            a line is logged, weights are rounded to what is saved and a piece may end. So how a
            phase is cut into pieces does not change its result.
        max_skipped: steps in a row that may be skipped for a loss that is not finite.
        optimizer: settings of the optimiser.
        phase: whatever else the phase depends on, as JSON values.
    """

    steps: int
    batch_rows: int
    seed: int = 0
    peak_lr: float = 0.01
    warmup_steps: int = 100
    decay_steps: int = 1000
    log_every: int = 25
    max_skipped: int = 20
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    phase: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One run of the command, as far as it does not change the result.

    Attributes:
        folder: state of the phase; resumed from if there is one, and saved to.
        log: JSON lines of all pieces so far.
        stop_after_seconds: save and return at the first stop at which `started` is so long ago;
            at least one is reached.
        started: `time.monotonic()` from which this piece's time counts; None is the call of `run`.
        graph: whether a step is one graph where the device has them.
    """

    folder: Path
    log: Path
    stop_after_seconds: float = math.inf
    started: float | None = None
    graph: bool = True


@dataclass(frozen=True)
class Progress:
    """Where a phase stands after a piece.

    Attributes:
        step: steps done.
        finished: whether these are all.
        seconds: wall time of all pieces.
        records: lines of the log.
    """

    step: int
    finished: bool
    seconds: float
    records: list[dict[str, Any]]


class Phase(Protocol):
    """What is trained. The tensors are changed in place, so their addresses never change."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Float32 leaves that require a gradient."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Tensors that `after_step` changes; saved whole."""

    @property
    def muon(self) -> frozenset[str]:
        """Names of the parameters that Muon updates."""

    def schedule(self, step: int) -> Mapping[str, float | bool]:
        """Return the inputs of a step; they are logged, and reach `loss` as [] tensors."""

    def loss(
        self, parameters: Mapping[str, Tensor], batch: Batch, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss [] and metrics, detached; those of shape [] are logged."""

    def after_step(self, metrics: Mapping[str, Tensor]) -> None:
        """Change the buffers in place; runs without gradients."""


def learning_rate(settings: LoopSettings, step: int) -> float:
    """Return the rate of a step: linear warm-up, constant, linear decay towards 0."""
    rise = (step + 1) / max(settings.warmup_steps, 1)
    fall = (settings.steps - step) / max(settings.decay_steps, 1)
    return settings.peak_lr * min(1.0, rise, fall)


def run(
    phase: Phase,
    settings: LoopSettings,
    piece: Piece,
    batches: Callable[[int], Generator[Batch, None, None]],
    *,
    show: Callable[[str], None] = print,
) -> Progress:
    """Train until the phase is finished or the piece's time is over, then save.

    Args:
        phase: its parameters hold the start values; a saved state replaces them.
        settings: must be those of the saved state.
        piece: folder, log and time limit.
        batches: makes the iterator of batches from a given step on; it is closed at the end.
        show: gets a line each time the log does.

    Raises:
        Diverged: `max_skipped` steps in a row were not finite; nothing is saved.
        StateError: see `load`.
    """
    started = time.monotonic() if piece.started is None else piece.started
    optimizer = Optimizer(phase.parameters, phase.muon, settings.optimizer)
    device = next(iter(phase.parameters.values())).device
    saved = load(piece.folder, asdict(settings), device)
    first, before, records = 0, 0.0, []
    if saved is not None:
        _restore(phase, optimizer, saved)
        first, before, records = saved.step, saved.seconds, list(saved.records)
    # What an aborted piece logged after the last save goes.
    piece.log.parent.mkdir(parents=True, exist_ok=True)
    piece.log.write_text("".join(json.dumps(item) + "\n" for item in records), encoding="utf-8")
    if first >= settings.steps:
        return Progress(first, True, before, records)

    tokens = records[-1]["tokens"] if records else 0
    window = _Window(device)
    step, stepper = first, Stepper(phase, optimizer, graph=piece.graph)
    with closing(batches(first)) as stream:
        for batch in stream:
            inputs, rate = phase.schedule(step), learning_rate(settings, step)
            window.add(*stepper(batch, inputs, rate), batch.tokens.numel())
            step += 1
            if step % settings.log_every and step < settings.steps:
                continue
            round_to_24_bits(phase.parameters)
            means = window.read(step, settings.max_skipped)
            tokens += window.tokens
            seconds = before + time.monotonic() - started
            record = {"step": step, "tokens": tokens, "lr": rate, "inputs": dict(inputs), **means}
            record["seconds"] = round(seconds, 1)
            window = _Window(device, window.in_a_row)
            records.append(record)
            with piece.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            show(_line(record, settings.steps))
            if step == settings.steps or seconds - before >= piece.stop_after_seconds:
                break

    seconds = before + time.monotonic() - started
    tensors = {f"buffer.{name}": value for name, value in phase.buffers.items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.state().items()}
    state = SavedState(step, seconds, phase.parameters, tensors, records)
    size = save(piece.folder, state, asdict(settings))
    show(f"saved step {step} of {settings.steps}: {size / 1e6:.1f} MB, {seconds:.0f} s in all")
    return Progress(step, step == settings.steps, seconds, records)


@torch.no_grad()
def _restore(phase: Phase, optimizer: Optimizer, saved: SavedState) -> None:
    buffers = {
        name.removeprefix("buffer."): value
        for name, value in saved.tensors.items()
        if name.startswith("buffer.")
    }
    for own, kept in ((phase.parameters, saved.weights), (phase.buffers, buffers)):
        if own.keys() != kept.keys():
            raise StateError(f"The saved state differs in {sorted(own.keys() ^ kept.keys())!r}.")
        for name, tensor in own.items():
            tensor.copy_(kept[name])
    optimizer.load(
        {
            name.removeprefix("optimizer."): value
            for name, value in saved.tensors.items()
            if name.startswith("optimizer.")
        }
    )


class _Window:
    """Sums over the steps since the last line of the log, on the device until they are read."""

    def __init__(self, device: torch.device, in_a_row: Tensor | None = None) -> None:
        self.tokens = 0
        self.in_a_row = torch.zeros((), device=device) if in_a_row is None else in_a_row
        self._longest = self.in_a_row
        self._applied = torch.zeros((), device=device)
        self._sums: Tensor | None = None
        self._names: list[str] = []
        self._steps = 0
        self._started = time.monotonic()

    @torch.no_grad()
    def add(
        self, loss: Tensor, metrics: Mapping[str, Tensor], facts: StepFacts, tokens: int
    ) -> None:
        scalars = {name: value for name, value in metrics.items() if value.dim() == 0}
        self._names = ["loss", "grad_norm", *scalars]
        values = torch.stack([v.float() for v in (loss, facts.grad_norm, *scalars.values())])
        values = torch.where(facts.applied, values, 0.0)
        self._sums = values if self._sums is None else self._sums + values
        self._applied = self._applied + facts.applied
        self.in_a_row = torch.where(facts.applied, 0.0, self.in_a_row + 1)
        self._longest = torch.maximum(self._longest, self.in_a_row)
        self._steps += 1
        self.tokens += tokens

    def read(self, step: int, max_skipped: int) -> dict[str, Any]:
        """Wait for the device; return the means over the steps that were applied."""
        assert self._sums is not None, "a window holds at least one step"
        extra = torch.stack([self._applied, self._longest])
        *sums, applied, longest = torch.cat([self._sums, extra]).tolist()
        if longest >= max_skipped:
            raise Diverged(
                f"{longest:.0f} steps in a row up to step {step} had a loss or gradients that are "
                f"not finite; {max_skipped - 1} are allowed. Lower the learning rate."
            )
        speed = self.tokens / (time.monotonic() - self._started)
        means = {name: sums[i] / applied if applied else None for i, name in enumerate(self._names)}
        return {**means, "skipped": self._steps - round(applied), "tokens_per_s": round(speed)}


def _line(record: Mapping[str, Any], steps: int) -> str:
    """Return the record as a line for a terminal."""
    hidden = ("step", "tokens", "inputs", "seconds", "tokens_per_s", "skipped")
    values = {key: value for key, value in record.items() if key not in hidden}
    values |= {key: value for key, value in record["inputs"].items() if value}
    shown = "  ".join(f"{key} {_short(value)}" for key, value in values.items())
    skipped = f"  SKIPPED {record['skipped']}" if record["skipped"] else ""
    speed = f"{record['tokens_per_s'] / 1e3:.0f}k tokens/s"
    return f"{record['step']:6d}/{steps}  {record['seconds']:6.0f} s  {speed}  {shown}{skipped}"


def _short(value: float | bool | None) -> str:
    return "-" if value is None else f"{float(value):.4g}"
