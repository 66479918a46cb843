"""What decoder-side bounded replay changes, against the length of the tail it keeps.

    python packages/deepinfer-core/benchmarks/replay.py [--model FOLDER] [--prompt 300]

For tails of W, 2W, 4W, ... rows (W is the window) the last prompt row's logits are compared with
those of an exact prefill: norm of the difference over norm of the logits, and whether the most
likely token is the same. W times the number of layers that skip rows is exact. Random weights
exaggerate; without `--model` the demo model is made.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.bench.report import print_table, report
from deepinfer_core.testing.runs import ModelRun, load_run


def last_logits(run: ModelRun, ids: torch.Tensor, tail: int | None) -> torch.Tensor:
    """Return the logits after a prompt whose late layers keep `tail` rows, or all when None."""
    tail_start = None if tail is None else max(len(ids) - tail, 0)
    return run.logits(run.forward(ids, tail_start=tail_start).hidden[-1:])[0]


def compare(folder: Path, numerics: str, length: int, count: int) -> list[dict[str, object]]:
    """Compare tails of growing length with the exact prefill."""
    run = load_run(folder, numerics, max_len=length)
    window = run.config.sliding_window
    late = run.config.num_hidden_layers - 1 - run.config.last_kv_source
    low = 3 + len(run.config.eos_token_ids)
    results = []
    prompts = [
        torch.randint(
            low, run.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
        )
        for seed in range(count)
    ]
    exact = [last_logits(run, ids, None) for ids in prompts]
    for factor in sorted({1, 2, 4, late}):
        found = [last_logits(run, ids, factor * window) for ids in prompts]
        change = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        same = sum(int(a.argmax() == b.argmax()) for a, b in zip(found, exact, strict=True))
        results.append(
            {
                "numerics": numerics,
                "tail": f"{factor}W",
                "rows": min(factor * window, length),
                "of": length,
                "smallest": f"{min(change):.2e}",
                "largest": f"{max(change):.2e}",
                "same_argmax": f"{same}/{count}",
            }
        )
    return results


def main() -> None:
    """Compare, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--prompt", type=int, default=300, help="tokens")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder is None:
            folder = Path(scratch) / "model"
            write_checkpoint(folder, demo_config(), seed=0)
        results = [
            line
            for numerics in ("ideal", "release")
            for line in compare(folder, numerics, options.prompt, options.prompts)
        ]
    columns = list(results[0])
    print_table(columns, [[result[column] for column in columns] for result in results])
    report("replay", {"results": results}, options.out)


if __name__ == "__main__":
    main()
