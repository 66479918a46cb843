"""Trains `deepinfer-nano` from nothing: the target, then its drafter, then both are exported.

    python -m nano.train --work WORK

Stops and resumes: with `--stop-after SECONDS` a run saves its state in WORK and ends; the same
command goes on from there. WORK/model is the quantised model, WORK/float the same in bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.engram import EngramHash, fold_vocabulary
from deepinfer_core.model.writer import write_model
from nano.geometry import config_dict
from nano.training.check import exact_match
from nano.training.drafter import DrafterTrainer
from nano.training.loader import Batch, batches
from nano.training.loop import LoopSettings, Phase, Piece, Progress, run
from nano.training.parameters import is_drafter, released, start_values
from nano.training.phases import DrafterPhase, Ramp, TargetPhase
from nano.training.target import Target

__all__ = ["main"]

_TOKENIZER = Path(__file__).parents[1] / "src/deepinfer_core/nano_model/tokenizer.json"
GENERATION = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}


@dataclass(frozen=True)
class Run:
    """What all parts of one command share."""

    arguments: argparse.Namespace
    config: ModelConfig
    hashes: EngramHash
    device: torch.device
    started: float

    @property
    def work(self) -> Path:
        """The folder of states, logs and results."""
        return Path(self.arguments.work)

    def target(self) -> Target:
        """Return the target as it is trained on this device."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return Target(self.config, self.hashes, dtype)


def main() -> int:
    """Train, as far as the time goes."""
    arguments = _arguments()
    started = time.monotonic()
    torch.set_float32_matmul_precision("high")
    device = torch.device(arguments.device)
    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    fold = fold_vocabulary(tokenizer)
    config = ModelConfig.from_dict(config_dict(int(fold.max()) + 1))
    job = Run(arguments, config, EngramHash.build(config, fold, device), device, started)
    values = start_values(config, arguments.seed)

    target = TargetPhase(
        job.target(),
        {name: value for name, value in values.items() if not is_drafter(name)},
        device,
        rounding=Ramp(*(int(arguments.steps * part) for part in arguments.rounding)),
        sparse_from=int(arguments.steps * arguments.sparse_from),
    )
    progress = _train(job, "target", target, arguments.steps, arguments.lr, arguments.seed, {})
    if not progress.finished:
        return 0
    frozen = target.values()
    _check(job, frozen, tokenizer)
    drafter = DrafterPhase(
        DrafterTrainer(job.target(), arguments.anchors),
        {name: value for name, value in values.items() if is_drafter(name)},
        frozen,
        device,
        rounding=Ramp(arguments.drafter_steps // 2, arguments.drafter_steps * 6 // 10),
    )
    # other rows than the target saw last
    seed = arguments.seed + 1
    progress = _train(
        job,
        "drafter",
        drafter,
        arguments.drafter_steps,
        arguments.drafter_lr,
        seed,
        {"behind": _fingerprint(frozen)},
    )
    if progress.finished:
        _export(job, frozen | drafter.values(), int(fold.max()) + 1)
    return 0


def _train(
    job: Run,
    name: str,
    phase: Phase,
    steps: int,
    peak_lr: float,
    seed: int,
    more: Mapping[str, str],
) -> Progress:
    """Run a phase as far as the time goes; `more` is what else its state depends on."""
    arguments = job.arguments
    # what came before the first phase, such as imports, counts as its time
    started = job.started if name == "target" else time.monotonic()

    def source(start: int) -> Generator[Batch, None, None]:
        return batches(
            arguments.tokenizer,
            seed,
            arguments.batch_rows,
            arguments.workers,
            start,
            device=job.device,
        )

    settings = LoopSettings(
        steps=steps,
        batch_rows=arguments.batch_rows,
        seed=seed,
        peak_lr=peak_lr,
        warmup_steps=min(200, steps // 10),
        decay_steps=int(steps * arguments.decay),
        log_every=100 if steps >= 1000 else 10,
        phase={
            "rounding": list(arguments.rounding),
            "sparse_from": arguments.sparse_from,
            "anchors": arguments.anchors,
            "geometry": repr(job.config),
            "tokenizer": hashlib.sha256(Path(arguments.tokenizer).read_bytes()).hexdigest(),
            **more,
        },
    )
    piece = Piece(
        folder=job.work / f"{name}-state",
        log=job.work / f"{name}.jsonl",
        # the time limit is the command's, whichever phase it reaches
        stop_after_seconds=arguments.stop_after - (started - job.started),
        started=started,
        graph=not arguments.eager,
    )
    return run(phase, settings, piece, source)


def _fingerprint(values: Mapping[str, Tensor]) -> str:
    """Return a hash of the target: a drafter is no use behind another one."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def _check(job: Run, values: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    """Print and keep the share of right replies; once, as it takes a while."""
    from nano.data.tasks import TASKS

    path = job.work / f"check-{_fingerprint(values)[:8]}.json"
    if path.exists() or not job.arguments.check:
        return
    tasks = [name for name in TASKS if name != "text"]
    found = {
        name: exact_match(
            job.target(),
            values,
            tokenizer,
            tasks,
            job.arguments.check,
            rounded=rounded,
        )
        for name, rounded in (("rounded", True), ("float", False))
    }
    for task in tasks:
        print(f"{task:16} rounded {found['rounded'][task]:7.2%}  float {found['float'][task]:7.2%}")
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _export(job: Run, values: Mapping[str, Tensor], num_classes: int) -> None:
    """Write the model folders and print the hash of the weights."""
    tensors = {name: value.cpu() for name, value in released(values).items()}
    tokenizer = Path(job.arguments.tokenizer).read_text(encoding="utf-8")
    for name, quantized in (("model", True), ("float", False)):
        folder = job.work / name
        shutil.rmtree(folder, ignore_errors=True)
        config = config_dict(num_classes, quantized=quantized)
        write_model(folder, config, tensors, tokenizer, GENERATION)
        weights = (folder / "model.safetensors").read_bytes()
        print(f"{name}: {len(weights) / 1e6:.2f} MB, sha256 {hashlib.sha256(weights).hexdigest()}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nano.train", description=__doc__)
    add = parser.add_argument
    add("--work", required=True, help="folder of the state, the logs and the results")
    add("--tokenizer", default=str(_TOKENIZER), help="tokenizer.json")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=16, help="processes that make rows")
    add("--stop-after", type=float, default=math.inf, help="seconds; save and end then")
    add("--steps", type=int, default=11000, help="steps of the target")
    add("--drafter-steps", type=int, default=2500)
    add("--batch-rows", type=int, default=32, help="rows of 1024 tokens a step")
    add("--lr", type=float, default=5e-3)
    add("--drafter-lr", type=float, default=5e-3)
    add("--decay", type=float, default=0.4, help="part of the steps over which the rate falls")
    add("--rounding", type=float, nargs=2, default=(0.55, 0.65), help="part where rounding sets in")
    add("--sparse-from", type=float, default=0.5, help="part from which selections are used")
    add("--anchors", type=int, default=64, help="blocks a row in the drafter's training")
    add("--check", type=int, default=96, help="held-out examples a task checked at the end")
    add("--seed", type=int, default=0)
    add("--eager", action="store_true", help="launch kernel by kernel, not as one graph")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
