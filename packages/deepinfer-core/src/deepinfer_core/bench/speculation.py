"""What speculation gains: policies side by side, on the same prompts, at the same loads.

Each policy and load gets an engine of its own, which answers some prompts first. Then as many
requests as the load says are kept running until all prompts are answered. What counts are decode
steps with all of them: how many drafts they verified, how many tokens came of it, how long they
took. Prompt steps, and steps at the end with fewer sequences, do not count.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_core.bench.report import check_writable, print_table, report
from deepinfer_core.bench.speculation_prompts import knows_tasks, prompts_of
from deepinfer_core.bench.speculation_run import Calibration, DecodeMeter, opened
from deepinfer_core.bench.step_costs import REPEATS, StepCosts, measure_costs
from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.speculation import choose_drafts, plan_speculation
from deepinfer_core.errors import ConfigError, DeepInferError, OutputError
from deepinfer_core.loader import find_backend, find_verifier
from deepinfer_core.model import nano
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.hub import resolve_model
from deepinfer_core.types import SamplingParams

__all__ = ["ACCEPTANCES", "POLICIES", "Asked", "Cell", "bench_speculation"]

POLICIES = ("off", "fixed", "threshold", "delayed")
ACCEPTANCES = ("target_noise", "rejection")

_WARM_UP_SEED, _SEED = 1, 2
_PROFILE_TOKENS = 256


@dataclass(frozen=True)
class Asked:
    """What to measure.

    Attributes:
        loads: sequences at a time. policies: of `POLICIES`. acceptances: of `ACCEPTANCES`.
        tokens: most of an answer.
        prompts: of each load; None for 4 a sequence and 8.
        temperature: of all requests; they have seeds.
        profile: measure what steps cost even if no policy needs it.
        save: where the measured costs go; None keeps them for this run.
        costs: measured before, used instead of measuring; None measures if a policy needs it.
    """

    loads: tuple[int, ...]
    policies: tuple[str, ...] = POLICIES
    acceptances: tuple[str, ...] = ("target_noise",)
    tokens: int = 128
    prompts: int | None = None
    temperature: float = 0.0
    profile: bool = False
    save: Path | None = None
    costs: str | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.costs is not None and (self.profile or self.save is not None):
            raise ConfigError(
                "`costs` names measured costs, and `profile` or `save` asks for measuring them. "
                "Leave one of them out."
            )
        if self.costs is not None and "delayed" not in self.policies:
            raise ConfigError(
                f"`costs` is {self.costs!r}, but no policy looks at costs: they are "
                f"{', '.join(self.policies)}. Add `delayed`, or leave `costs` out."
            )
        if self.save is not None and len(self.loads) > 1:
            raise ConfigError(
                f"`save` stores the costs of one load, but there are {len(self.loads)}: "
                f"{', '.join(map(str, self.loads))}. Steps of as many rows take longer the more "
                "sequences they have. Ask for the load that the engine will have."
            )
        if self.save is not None and len(self.acceptances) > 1:
            raise ConfigError(
                f"`save` stores the costs under one rule, but `acceptance` has "
                f"{len(self.acceptances)}: {', '.join(self.acceptances)}. Ask for the rule that "
                "the engine will have."
            )

    @property
    def measures(self) -> bool:
        """Whether costs are to be measured."""
        wanted = self.profile or self.save is not None or "delayed" in self.policies
        return wanted and self.costs is None


@dataclass(frozen=True)
class Cell:
    """One policy at one load.

    Attributes:
        policy, acceptance, load: which; no acceptance for `off`.
        steps: decode steps that counted.
        verified_per_row: drafts of a sequence in a step. accepted_len: tokens it was given.
        tokens_per_second: of decoding, all sequences together. step_ms: median of a step.
        calibration: None without drafts.
        texts: what was answered to each prompt.
    """

    policy: str
    acceptance: str | None
    load: int
    steps: int
    verified_per_row: float
    accepted_len: float
    tokens_per_second: float
    step_ms: float
    calibration: Calibration | None
    texts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        policy: str,
        acceptance: str | None,
        meter: DecodeMeter,
        texts: Sequence[tuple[int, ...]],
    ) -> Cell:
        """Return what a meter has read.

        Raises:
            ConfigError: no step counted.
        """
        if not meter.rows:
            raise ConfigError(
                f"No decode step of policy {policy!r} had {meter.load} sequences: answers were too "
                "short or too few. Ask for more `tokens` or `prompts`, or a smaller load."
            )
        seconds = [each for times in meter.step_seconds.values() for each in times]
        return cls(
            policy=policy,
            acceptance=acceptance,
            load=meter.load,
            steps=meter.steps,
            verified_per_row=meter.verified / meter.rows,
            accepted_len=meter.tokens / meter.rows,
            tokens_per_second=meter.tokens / meter.seconds,
            step_ms=statistics.median(seconds) * 1e3,
            calibration=meter.calibration(),
            texts=tuple(texts),
        )


def bench_speculation(config: EngineConfig, asked: Asked, out: Path | None = None) -> list[Cell]:
    """Measure, print a table and a JSON line, and store the costs if asked.

    Args:
        config: options of the engine; policy, acceptance, costs and number of sequences are set
            here.
        asked: what to measure.
        out: file that the JSON line is appended to.

    Raises:
        ConfigError: an option does not fit the model or what is installed.
        OutputError: the costs or the JSON line cannot be stored.
        DeepInferError: a request failed, or texts of strict requests are not those of `off`.
    """
    check_writable(asked.save)
    check_writable(out)
    bench = _Bench.of(config, asked)
    costs = bench.measured_costs() if asked.measures else {}
    for rule, measured in costs.items():
        _print_costs(rule, measured)
    cells = bench.cells(costs)
    _print_cells(cells)
    _print_rejection(cells)
    figures = {
        "model": config.model or nano.NAME,
        "determinism": config.determinism,
        "temperature": asked.temperature,
        "tokens": asked.tokens,
        "prompts": asked.prompts,
        "cells": [_figures(cell, cells) for cell in cells],
        "costs": [line for rule, each in costs.items() for line in _cost_figures(rule, each)],
    }
    report("speculation", figures, out)
    if config.determinism == "strict":
        _check_texts(cells)
    return cells


@dataclass(frozen=True)
class _Bench:
    config: EngineConfig
    asked: Asked
    folder: Path
    model: ModelConfig
    verifier_class: type[Any] | None

    @classmethod
    def of(cls, config: EngineConfig, asked: Asked) -> _Bench:
        folder = resolve_model(config.model)
        bench = cls(config, asked, folder, ModelConfig.from_folder(folder), find_verifier())
        for policy in asked.policies:  # before an hour is spent on those that can be measured
            for rule in asked.acceptances:
                wanted = bench._config(policy, rule, 1, None)
                choose_drafts(wanted, bench.model, installed=bench.verifier_class is not None)
                if policy == "delayed" and asked.costs is not None:
                    wanted = bench._config(policy, rule, 1, asked.costs)
                    backend = find_backend(config.accelerator, config.numerics)
                    plan_speculation(wanted, bench.model, backend, folder, bench.verifier_class)
        return bench

    def measured_costs(self) -> Mapping[str, StepCosts]:
        """Measure what steps cost at each load, by rule of acceptance, and store it if asked."""
        asked, verifier_class = self.asked, self._installed()
        prompts = prompts_of(self.folder, self.model, 2 * max(asked.loads), _WARM_UP_SEED)
        params = self._params(0, tokens=_PROFILE_TOKENS, endless=True)
        costs = {}
        for rule in asked.acceptances:
            config = self._config("fixed", rule, max(asked.loads), None)
            costs[rule] = measure_costs(config, verifier_class, asked.loads, prompts, params)
            if asked.save is not None:
                self._write(costs[rule], asked.loads[0], asked.save)
                print(f"stored in {asked.save}")
        return costs

    def cells(self, costs: Mapping[str, StepCosts]) -> list[Cell]:
        """Measure every policy at every load, load by load."""
        found = []
        for load in self.asked.loads:
            for policy in self.asked.policies:
                rules = (None,) if policy == "off" else self.asked.acceptances
                found += [
                    self._cell(policy, rule, load, None if rule is None else costs.get(rule))
                    for rule in rules
                ]
        return found

    def _cell(self, policy: str, rule: str | None, load: int, costs: StepCosts | None) -> Cell:
        with tempfile.TemporaryDirectory() as scratch:
            file = self.asked.costs
            if policy != "delayed":
                file = None
            elif costs is not None:
                file = str(Path(scratch) / "costs.json")
                self._write(costs, load, Path(file))
            config = self._config(policy, rule, load, file)
            count = 4 * load + 8 if self.asked.prompts is None else self.asked.prompts
            meter = DecodeMeter(load)
            with opened(config, self.verifier_class) as traffic:
                traffic.run(self._traffic(load, _WARM_UP_SEED), load)
                texts = traffic.run(self._traffic(count, _SEED), load, watcher=meter)
        return Cell.of(policy, rule, meter, texts)

    def _traffic(self, count: int, seed: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
        prompts = prompts_of(self.folder, self.model, count, seed)
        endless = not knows_tasks(self.folder)
        return [
            (prompt, self._params(place, tokens=self.asked.tokens, endless=endless))
            for place, prompt in enumerate(prompts)
        ]

    def _params(self, place: int, *, tokens: int, endless: bool) -> SamplingParams:
        return SamplingParams(
            max_tokens=tokens, temperature=self.asked.temperature, seed=place, ignore_eos=endless
        )

    def _config(self, policy: str, rule: str | None, load: int, costs: str | None) -> EngineConfig:
        wanted = {
            "speculation": policy,
            "acceptance": rule or "target_noise",
            "speculation_costs": costs,
            "max_sequences": load,
        }
        if policy == "off":
            wanted["num_drafts"] = None
        return EngineConfig(**{**self.config.model_dump(exclude_unset=True), **wanted})

    def _write(self, costs: StepCosts, load: int, path: Path) -> None:
        samples, origin = costs.seconds[load], costs.fingerprint
        try:
            self._installed().write_costs(path, samples, fingerprint=origin)
        except OSError as error:
            raise OutputError(f"`{path}` cannot be written: {error.strerror}.") from error

    def _installed(self) -> type[Any]:
        if self.verifier_class is None:
            raise ConfigError(
                "What steps cost is measured with drafts, but the package `deepinfer-specdec` is "
                "not installed. Install it."
            )
        return self.verifier_class


def _same(cells: Sequence[Cell], policy: str, like: Cell) -> Cell | None:
    """Return the cell of another policy at the same load, under the same rule."""
    rule = None if policy == "off" else like.acceptance
    wanted = (policy, rule, like.load)
    return next((c for c in cells if (c.policy, c.acceptance, c.load) == wanted), None)


def _ratio(cells: Sequence[Cell], policy: str, cell: Cell) -> float | None:
    base = _same(cells, policy, cell)
    return None if base is None else cell.tokens_per_second / base.tokens_per_second


def _num_equal(cells: Sequence[Cell], cell: Cell) -> int | None:
    """Return how many texts are those of plain decoding; None where they need not be."""
    plain = _same(cells, "off", cell)
    if plain is None or cell.acceptance != "target_noise":
        return None
    return sum(one == other for one, other in zip(cell.texts, plain.texts, strict=True))


def _check_texts(cells: Sequence[Cell]) -> None:
    for cell in cells:
        equal = _num_equal(cells, cell)
        if equal is not None and equal < len(cell.texts):
            raise DeepInferError(
                f"Only {equal} of {len(cell.texts)} texts of policy {cell.policy!r} at load "
                f"{cell.load} are those of plain decoding. In strict mode all of them must be: "
                "this is a fault of the engine or of the kernel backend."
            )


def _print_costs(rule: str, costs: StepCosts) -> None:
    header = ("load", "rows", "ms", "ms per draft")
    lines = []
    for load, sizes in costs.seconds.items():
        first = statistics.median(sizes[load]) * 1e3
        for rows, seconds in sizes.items():
            ms = statistics.median(seconds) * 1e3
            slope = "-" if rows == load else f"{(ms - first) / (rows - load):.3f}"
            lines.append((load, rows, f"{ms:.2f}", slope))
    print(f"costs of decode steps under {rule}, medians of {REPEATS} or more:")
    print_table(header, lines)


def _print_cells(cells: Sequence[Cell]) -> None:
    header = (
        "policy", "acceptance", "load", "drafts/row", "tokens/row", "tokens/s", "over off",
        "over fixed", "full steps", "ECE", "predicted/accepted", "step ms", "texts as off",
    )  # fmt: skip
    lines = []
    for cell in cells:
        seen, equal = cell.calibration, _num_equal(cells, cell)
        lines.append(
            (
                cell.policy,
                cell.acceptance or "-",
                cell.load,
                f"{cell.verified_per_row:.2f}",
                f"{cell.accepted_len:.2f}",
                f"{cell.tokens_per_second:.1f}",
                _shown(_ratio(cells, "off", cell), "{:.3f}"),
                _shown(_ratio(cells, "fixed", cell), "{:.3f}"),
                _shown(seen.full_share if seen else None, "{:.0%}"),
                _shown(max(seen.ece) if seen and seen.ece else None, "{:.1%}"),
                _shown(seen.predicted_accepted_ratio if seen else None, "{:.3f}"),
                f"{cell.step_ms:.2f}",
                "-" if equal is None else f"{equal}/{len(cell.texts)}",
            )
        )
    print_table(header, lines)
    print("ECE: calibration error of the worst position, of steps that verified all drafts.")


def _print_rejection(cells: Sequence[Cell]) -> None:
    """Say what rejection sampling gains, where both rules were measured."""
    for cell in cells:
        wanted = (cell.policy, "rejection", cell.load)
        other = next((c for c in cells if (c.policy, c.acceptance, c.load) == wanted), None)
        if cell.acceptance == "target_noise" and other is not None:
            tokens = other.accepted_len / cell.accepted_len - 1
            speed = other.tokens_per_second / cell.tokens_per_second - 1
            print(
                f"rejection over target noise, {cell.policy}, load {cell.load}: tokens/row "
                f"{tokens:+.1%}, tokens/s {speed:+.1%}"
            )


def _shown(value: float | None, pattern: str) -> str:
    return "-" if value is None or math.isnan(value) else pattern.format(value)


def _figures(cell: Cell, cells: Sequence[Cell]) -> Mapping[str, object]:
    figures = asdict(cell)
    del figures["texts"]
    return {
        **figures,
        "over_off": _ratio(cells, "off", cell),
        "over_fixed": _ratio(cells, "fixed", cell),
        "num_texts": len(cell.texts),
        "texts_as_off": _num_equal(cells, cell),
    }


def _cost_figures(rule: str, costs: StepCosts) -> list[Mapping[str, object]]:
    return [
        {
            "acceptance": rule,
            "load": load,
            "rows": rows,
            "steps": len(seconds),
            "ms": statistics.median(seconds) * 1e3,
        }
        for load, sizes in costs.seconds.items()
        for rows, seconds in sizes.items()
    ]
