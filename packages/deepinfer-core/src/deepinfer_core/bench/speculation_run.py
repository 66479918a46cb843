"""Traffic of a steady load through an engine, and what its decode steps come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.engine import Engine, build_engine
from deepinfer_core.engine.records import StepRecord
from deepinfer_core.engine.requests import RequestReader
from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.errors import DeepInferError
from deepinfer_core.loader import find_backend
from deepinfer_core.metrics.speculation import SpeculationMetrics
from deepinfer_core.model.hub import resolve_model
from deepinfer_core.plans import StepKind
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.types import FinishReason, Request, SamplingParams

__all__ = ["DecodeMeter", "Traffic", "opened"]


class DecodeMeter:
    """What decode steps at one load did; called by the engine for each settled step, in order.

    Steps with other numbers of sequences do not count, nor do steps after idling. A row says
    nothing behind its end: what an ended sequence still computed, and drafts behind a stop, do not
    count either.

    Args:
        load: sequences of a step that counts.

    Attributes:
        steps, seconds: that counted; seconds from the end of the step before to the end of each,
            on the device's clock where it tells, else as the host saw results come.
        step_seconds: rows of a step -> seconds of each.
        rows: sequences in these steps that were still alive. verified: drafts verified of them.
        tokens: that these were given.
    """

    def __init__(self, load: int) -> None:
        """Start with nothing."""
        self.load = load
        self.steps = self.rows = self.verified = self.tokens = 0
        self.seconds = 0.0
        self.step_seconds: dict[int, list[float]] = {}
        self._metrics = SpeculationMetrics()
        self._last_seq, self._last_end = -1, 0

    def __call__(self, record: StepRecord, settlement: Settlement) -> None:
        """Take a settled step."""
        end = record.wait_end_ns if record.device is None else record.device.forward[1]
        seconds = (end - self._last_end) * 1e-9
        follows = record.step_seq == self._last_seq + 1 and not record.after_idle
        self._last_seq, self._last_end = record.step_seq, end
        decodes = record.kind is StepKind.DECODE and record.num_sequences == self.load
        if not (decodes and follows):
            return
        kept, result = settlement.kept, settlement.result
        self.steps += 1
        self.seconds += seconds
        self.step_seconds.setdefault(record.num_rows, []).append(seconds)
        self.rows += int((kept > 0).sum())
        self.verified += int(result.num_verified[kept > 0].sum())
        self.tokens += int(kept.sum())
        if settlement.survival is not None:
            whole = kept == result.num_tokens
            self._metrics.observe(settlement.step.plan, result, *settlement.survival, whole)

    def calibration(self) -> Calibration | None:
        """Return how good the drafter's chances were; None without any."""
        families = self._metrics.families()
        if not families:
            return None
        steps = families["verify_steps"].values
        errors = families["survival_ece"].values
        [ratio] = families["predicted_accepted_ratio"].values.values()
        full, trimmed = _number(steps["full",]), _number(steps["trimmed",])
        return Calibration(
            full_share=full / (full + trimmed),
            ece=tuple(_number(each) for each in errors.values()),
            predicted_accepted_ratio=_number(ratio),
        )


@dataclass(frozen=True)
class Calibration:
    """Predictions and outcomes.

    Attributes:
        full_share: of steps at which all drafts were verified.
        ece: expected calibration error of the survival of each position, of such steps alone; ()
            without any.
        predicted_accepted_ratio: drafts that should have stood over those that did.
    """

    full_share: float
    ece: tuple[float, ...]
    predicted_accepted_ratio: float


def _number(value: object) -> float:
    assert isinstance(value, int | float), f"{value!r} is no number"
    return float(value)


class Traffic:
    """An engine and requests for it.

    Args:
        engine: runs them; nothing else is in it.
        reader: makes requests.
    """

    def __init__(self, engine: Engine, reader: RequestReader) -> None:
        """Start with nothing submitted."""
        self.engine, self._reader = engine, reader
        self._num_requests = 0

    def run(
        self,
        prompts: Iterable[tuple[tuple[int, ...], SamplingParams]],
        load: int,
        *,
        watcher: Callable[[StepRecord, Settlement], None] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> list[tuple[int, ...]]:
        """Keep `load` requests running until none is left; return their tokens in order.

        Args:
            prompts: what to decode behind; taken one by one as requests end.
            load: requests at a time.
            watcher: sees each settled step.
            enough: asked after each step whether to abort the rest, which then have fewer tokens.

        Raises:
            DeepInferError: a request failed.
        """
        engine, waiting = self.engine, iter(prompts)
        texts: dict[int, list[int]] = {}
        live: dict[int, str] = {}
        engine.clear_cache()
        engine.watch(watcher)
        try:
            while True:
                while len(live) < load and (request := self._next(waiting)) is not None:
                    texts[request.uid] = []
                    live[request.uid] = request.client_id
                    engine.submit(request)
                if not live or enough():
                    break
                for update in engine.step():
                    texts[update.uid] += update.token_ids
                    if update.finish_reason is FinishReason.ERROR:
                        raise DeepInferError(
                            f"A request failed while it was measured: {update.error}"
                        )
                    if update.finish_reason is not None:
                        del live[update.uid]
        finally:
            for client_id in live.values():
                engine.abort(client_id)
            while engine.has_work:
                engine.step()
            engine.watch(None)
        return [tuple(tokens) for tokens in texts.values()]

    def _next(self, waiting: Iterator[tuple[tuple[int, ...], SamplingParams]]) -> Request | None:
        item = next(waiting, None)
        if item is None:
            return None
        self._num_requests += 1
        return self._reader.read(list(item[0]), item[1], self._num_requests)


@contextmanager
def opened(config: EngineConfig, verifier_class: type[Any] | None) -> Iterator[Traffic]:
    """Load the model of `config`, and let it go at the end.

    Raises:
        ConfigError, CheckpointError: as of `build_engine`.
    """
    folder = resolve_model(config.model)
    codec = TextCodec(folder)
    backend = find_backend(config.accelerator, config.numerics)
    engine = build_engine(config, backend, folder, codec.tokenizer, verifier_class)
    reader = RequestReader(
        config,
        engine.model_config,
        limits=engine.limits,
        encode=codec.encode,
        no_strict=None if backend.supports("strict") else backend.name,
    )
    try:
        yield Traffic(engine, reader)
    finally:
        engine.close()
