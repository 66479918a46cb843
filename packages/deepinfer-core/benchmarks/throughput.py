"""Prefill and decode speed of the engine on the demo model: the base line of later work.

    python packages/deepinfer-core/benchmarks/throughput.py [--batch 1 8] [--prompt 256]

Greedy, random prompts of one length, every request runs to `--output` tokens. Speeds are rows of
prefill steps and of decode steps over the wall time of those steps, scheduling included. The last
column is the share of a step's wall time that is not spent in the model and sampler.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.bench.report import print_table, report


def measure(
    folder: Path, numerics: str, determinism: str, batch: int, prompt: int, output: int
) -> dict[str, object]:
    """Run one batch after a small one that warms up."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(8, 500, (batch, prompt), generator=generator).tolist()
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    options = {"numerics": numerics, "determinism": determinism, "max_sequences": batch}
    with LLM(folder, accelerator="cpu", max_model_len=prompt + output + 8, **options) as llm:
        llm.generate(prompts[:1], SamplingParams(max_tokens=2, temperature=0))
        llm.engine.stats = type(llm.engine.stats)()
        worker, spent = llm.engine._worker, [0.0]
        launch = worker.launch

        def timed(plan):  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            ticket = launch(plan)
            spent[0] += time.perf_counter() - began
            return ticket

        worker.launch = timed  # type: ignore[method-assign]
        llm.generate(prompts, params)
        stats = llm.engine.stats
    total = stats.prefill_seconds + stats.decode_seconds
    return {
        "numerics": numerics,
        "determinism": determinism,
        "batch": batch,
        "prompt": prompt,
        "output": output,
        "prefill_tok_s": round(stats.prefill_tokens / stats.prefill_seconds, 1),
        "decode_tok_s": round(stats.decode_tokens / stats.decode_seconds, 1),
        "host_share": round(1 - spent[0] / total, 4),
    }


def main() -> None:
    """Measure every numerics mode, fast and strict, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_checkpoint(folder, demo_config(), seed=0)
        for numerics in ("ideal", "cache", "release"):
            for determinism in ("normal", "strict"):
                for batch in options.batch:
                    sizes = (batch, options.prompt, options.output)
                    results.append(measure(folder, numerics, determinism, *sizes))
    columns = list(results[0])
    print_table(columns, [[result[column] for column in columns] for result in results])
    report("throughput", {"results": results}, options.out)


if __name__ == "__main__":
    main()
