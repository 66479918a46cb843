"""Held-out questions to a model folder, and how well it does.

    python -m nano.evaluate [--model FOLDER] [--count N] [--tasks NAME ..] [--float FOLDER]

Replies are greedy, by the engine on the CPU: release numerics, normal determinism. Every reply of a
conversation is asked for with the true history; an example is right if all of its replies are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from deepinfer_core.bench.acceptance import Verified
from deepinfer_core.bench.report import print_table, report
from deepinfer_core.engine.speculation import CALIBRATION_NAME
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.fingerprint import checkpoint_hash
from deepinfer_core.model.hub import resolve_model
from deepinfer_specdec.calibrate import (
    DrafterCalibration,
    TrafficCalibration,
    ece,
    fit,
    predicted_survival,
)
from nano.data.encoding import Encoded, encode, is_document
from nano.data.stream import held_out
from nano.data.tasks import TASKS
from nano.judge import Ask, Judge, Verdict, asks_of
from nano.measure import Done, Share, Text, work

__all__ = ["Settings", "Summary", "evaluate", "main"]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        folder: the model.
        float_folder: the same model before quantisation, for its perplexity; or None.
        tasks: names.
        count: examples of each.
        num_verified: examples of each whose replies the drafter is measured on, and of whose true
            replies the perplexity is taken.
        seed: of the examples.
        processes: with one thread each.
        calibration: take the held-out examples that are for calibration instead of those that test.
    """

    folder: Path
    float_folder: Path | None
    tasks: tuple[str, ...]
    count: int
    num_verified: int
    seed: int
    processes: int
    calibration: bool = False


@dataclass(frozen=True)
class _Example:
    task: str
    encoded: Encoded
    asks: tuple[Ask, ...]
    is_measured: bool


@dataclass(frozen=True)
class Summary:
    """What came out.

    Attributes:
        rows: a mapping of figures for each task; shares in percent.
        drafter: figures of all tasks together; empty for a model without a drafter.
        speed: tokens a second, of all processes together.
        verified: blocks of all tasks.
    """

    rows: tuple[dict[str, Any], ...]
    drafter: dict[str, Any]
    speed: dict[str, float]
    verified: Verified


def evaluate(settings: Settings) -> Summary:
    """Ask, judge and measure."""
    began = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(settings.folder / "tokenizer.json"))
    examples = _examples(settings, tokenizer)
    asks = [(place, ask) for place, each in enumerate(examples) for ask in each.asks]
    # the longest first, dealt out in turn: shares take about as long as one another
    order = sorted(range(len(asks)), key=lambda i: (-len(asks[i][1].prompt), i))
    measured = [place for place, each in enumerate(examples) if each.is_measured]
    shares = []
    for process in range(settings.processes):
        mine = order[process :: settings.processes]
        verify = [i for i, ask in enumerate(mine) if examples[asks[ask][0]].is_measured]
        shares.append(
            Share(
                folder=settings.folder,
                float_folder=settings.float_folder,
                asks=tuple(asks[i][1] for i in mine),
                verify=tuple(verify),
                texts=tuple(_text(examples[i]) for i in measured[process :: settings.processes]),
            )
        )
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(work, shares))
    replies: list[tuple[int, ...]] = [()] * len(asks)
    losses: dict[int, np.ndarray] = {}
    verified: list[Verified] = []
    for process, each in enumerate(done):
        mine = order[process :: settings.processes]
        for i, reply in zip(mine, each.replies, strict=True):
            replies[i] = reply
        losses |= dict(zip(measured[process :: settings.processes], each.losses, strict=True))
        if each.verified is not None:
            names = np.array([mine[i] for i in shares[process].verify], dtype=np.int64)
            verified.append(replace(each.verified, text=names[each.verified.text]))
    size = ModelConfig.from_folder(settings.folder).dspark_block_size
    blocks = Verified.joined(verified, size)
    judge = Judge(settings.folder)
    verdicts: dict[int, list[Verdict]] = defaultdict(list)
    for (place, ask), reply in zip(asks, replies, strict=True):
        verdicts[place].append(judge.verdict(ask, reply))
    task_of = np.array([settings.tasks.index(examples[place].task) for place, _ in asks], np.int64)
    rows = []
    for number, task in enumerate(settings.tasks):
        places = [i for i, each in enumerate(examples) if each.task == task]
        rows.append(
            {
                "task": task,
                **_judged([verdicts[i] for i in places if i in verdicts]),
                **_perplexity([losses[i] for i in places if i in losses], settings),
                "accepted_len": _rounded(
                    blocks.rows((task_of == number)[blocks.text]).accepted_len()
                ),
            }
        )
    speed = _speed(done) | {"seconds": round(time.perf_counter() - began, 1)}
    return Summary(tuple(rows), _drafter(settings, blocks), speed, blocks)


def _examples(settings: Settings, tokenizer: Tokenizer) -> list[_Example]:
    found = []
    for task in settings.tasks:
        drawn = held_out(
            tokenizer, task, settings.count, settings.seed, calibration=settings.calibration
        )
        for number, example in enumerate(drawn):
            encoded = encode(example, tokenizer)
            asks = () if is_document(example.conversation) else tuple(asks_of(encoded))
            found.append(_Example(task, encoded, asks, number < settings.num_verified))
    return found


def _text(example: _Example) -> Text:
    """Return the tokens whose perplexity is taken: replies, or all of a document."""
    ids = tuple(map(int, example.encoded.token_ids))
    spans = example.encoded.replies or ((1, len(ids)),)
    return Text(ids, tuple(i for start, end in spans for i in range(start, end)))


def _judged(verdicts: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    turns = [each for turns in verdicts for each in turns]
    return {
        "examples": len(verdicts),
        "right": _percent(all(each.right for each in turns) for turns in verdicts),
        "exact": _percent(all(each.exact for each in turns) for turns in verdicts),
        "turns_right": _percent(each.right for each in turns),
        "calls_equal": _percent(t.calls_equal for t in turns if t.calls_equal is not None),
        "json_valid": _percent(t.is_json for t in turns if t.is_json is not None),
    }


def _perplexity(losses: Sequence[np.ndarray], settings: Settings) -> dict[str, Any]:
    """Return perplexities of the folder and, if it was given, of the one with floats."""
    values: list[float | None] = [None, None]
    if losses:
        count, *sums = np.sum(losses, axis=0)
        values = [_rounded(float(np.exp(total / count)), 4) for total in sums]
    if settings.float_folder is None:
        return {"perplexity": values[0]}
    return {"perplexity": values[0], "perplexity_float": values[1]}


def _drafter(settings: Settings, blocks: Verified) -> dict[str, Any]:
    if not len(blocks.text):
        return {}
    complete = blocks.complete
    logits, accepted = blocks.confidence[complete], blocks.accepted[complete]
    figures: dict[str, Any] = {
        "blocks": len(blocks.text),
        "complete_blocks": int(complete.sum()),
        "accepted_len": _rounded(blocks.accepted_len(), 3),
        "acceptance": [_rounded(float(each), 4) for each in blocks.acceptance()],
    }
    if len(logits) < 2:
        return figures
    if (known := _known_temperatures(settings)) is not None:
        # chosen on other examples, see `is_for_calibration`
        temperatures, source = known, CALIBRATION_NAME
        tested = np.ones(len(logits), dtype=bool)
    else:
        # one half of the texts chooses the temperatures, the other one tests them
        fitted = blocks.text[complete] % 2 == 0
        if fitted.all() or not fitted.any():
            return figures
        temperatures = fit(logits[fitted], accepted[fitted]).temperatures
        tested, source = ~fitted, "the other half of the texts"
    before = _errors(logits[tested], accepted[tested], np.ones(logits.shape[1]))
    after = _errors(logits[tested], accepted[tested], np.array(temperatures))
    return figures | {
        "temperatures": [_rounded(each, 4) for each in temperatures],
        "temperatures_from": source,
        "ece_before": before,
        "ece_after": after,
    }


def _known_temperatures(settings: Settings) -> tuple[float, ...] | None:
    """Return those of the model's calibration for greedy requests; None if there are none.

    Raises:
        CalibrationError: the file belongs to another model.
    """
    file = settings.folder / CALIBRATION_NAME
    if settings.calibration or not file.exists():
        return None
    known = DrafterCalibration.load(
        file,
        block_size=ModelConfig.from_folder(settings.folder).dspark_block_size,
        checkpoint=checkpoint_hash(settings.folder),
    )
    greedy = [each.temperatures for each in known.classes if each.traffic == "greedy"]
    return greedy[0] if greedy else None


def _errors(logits: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray) -> list[float]:
    predicted = predicted_survival(logits.astype(np.float64), temperatures)
    return [round(ece(predicted[:, k], accepted > k), 4) for k in range(logits.shape[1])]


def write_calibration(settings: Settings, blocks: Verified) -> Path:
    """Choose temperatures by these blocks and write the model's `calibration.json`."""
    complete = blocks.complete
    found = fit(blocks.confidence[complete], blocks.accepted[complete])
    measured = TrafficCalibration(
        traffic="greedy",
        acceptance="target_noise",
        temperatures=found.temperatures,
        data_set=f"deepinfer-nano held-out tasks, calibration part, seed {settings.seed}",
        num_blocks=int(complete.sum()),
        ece_before=found.ece_before,
        ece_after=found.ece_after,
    )
    path = settings.folder / CALIBRATION_NAME
    weights = checkpoint_hash(settings.folder)
    DrafterCalibration(blocks.block_size, weights, (measured,)).save(path)
    return path


def _speed(done: Sequence[Done]) -> dict[str, float]:
    prefill = sum(each.prefill_tokens / each.prefill_seconds for each in done if each.replies)
    decode = sum(
        each.decode_tokens / each.decode_seconds for each in done if each.decode_seconds > 0
    )
    return {"prefill_tok_s": round(prefill, 1), "decode_tok_s": round(decode, 1)}


def _percent(values: Iterable[bool | None]) -> float | None:
    known = [bool(value) for value in values]
    return round(100 * sum(known) / len(known), 2) if known else None


def _rounded(value: float, digits: int = 2) -> float | None:
    return None if np.isnan(value) else round(value, digits)


def _settings(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="nano.evaluate", description=__doc__)
    parser.add_argument("--model", help="folder; default: the model that comes with the package")
    parser.add_argument("--float", type=Path, help="folder of the same model in bfloat16")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--count", type=int, default=100, help="examples of each task")
    parser.add_argument(
        "--measured", type=int, default=20, help="of these, for drafter and perplexity"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the examples")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure on the examples for calibration and write calibration.json",
    )
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    options = parser.parse_args(arguments)
    settings = Settings(
        folder=resolve_model(options.model),
        float_folder=options.float,
        tasks=tuple(options.tasks),
        count=options.count,
        num_verified=options.measured,
        seed=options.seed,
        processes=options.processes,
        calibration=options.calibrate,
    )
    return settings, options


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate and report."""
    settings, options = _settings(arguments)
    _known_temperatures(settings)  # a file of another model should be told now, not at the end
    summary = evaluate(settings)
    columns = list(summary.rows[0])
    cells = [["-" if row[c] is None else row[c] for c in columns] for row in summary.rows]
    print_table(columns, cells)
    for name, value in (summary.drafter | summary.speed).items():
        print(f"{name}: {value}")
    if options.calibrate:
        print(f"written: {write_calibration(settings, summary.verified)}", file=sys.stderr)
    figures = {
        "checkpoint": checkpoint_hash(settings.folder),
        "seed": settings.seed,
        "tasks": list(summary.rows),
        "drafter": summary.drafter,
        "speed": summary.speed,
    }
    report("nano.evaluate", figures, options.json)


if __name__ == "__main__":
    main()
