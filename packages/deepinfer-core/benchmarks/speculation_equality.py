"""Texts of every verification policy and length against plain decoding, over many tokens.

    python packages/deepinfer-core/benchmarks/speculation_equality.py [--tokens 10000]

Strict, with requests of every kind: greedy and sampled with seeds, filters, penalties, biases, stop
texts and ids, log-probabilities. Each variant answers them all and must give the same ids, texts,
ends and log-probabilities as plain decoding one step at a time. A line for each variant, as it is
done: tokens compared, whether they are equal, tokens of a sequence and step. Ends with status 1
when one differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

from deepinfer_core import LLM, EngineConfig
from deepinfer_core.bench.report import report
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.hub import resolve_model
from deepinfer_core.testing.speculation_variants import (
    Mixed,
    Variant,
    answers,
    mixed_requests,
    variants,
    write_steep_costs,
)

# Of requests of all kinds, with answers of at most 64 tokens.
_TOKENS_OF_AN_ANSWER = 30


def run(
    options: dict[str, object], variant: Variant, mixed: Mixed
) -> tuple[list[tuple[tuple[int, ...], str, str, object]], dict[str, object]]:
    """Return the answers of one variant, and what it took."""
    began = time.perf_counter()
    with LLM(**{**options, **variant.options}) as llm:
        found = answers(llm, mixed)
        llm.engine.audit()
        families = llm.engine.metrics()
    count = sum(len(ids) for ids, *_ in found)
    rows, yielded, drafts = (
        sum(families[name].values.values())
        for name in ("decode_rows", "yielded_tokens", "verified_tokens")
    )
    figures = {
        "variant": variant.name,
        "tokens": count,
        "tokens_per_row": round(yielded / rows, 3),
        "drafts_per_row": round(drafts / rows, 3),
        "seconds": round(time.perf_counter() - began, 1),
    }
    return found, figures


def main() -> None:
    """Compare every variant with plain decoding; leaves by status 1 when one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder; default: the model that comes with the package")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--tokens", type=int, default=10_000, help="to compare, about")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time")
    parser.add_argument("--only", help="variants whose names have this in them, such as 'depth 2'")
    parser.add_argument("--stop-after", type=float, help="seconds after which no variant starts")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    asked = parser.parse_args()
    began = time.perf_counter()
    folder = resolve_model(asked.model)
    options: dict[str, object] = {
        "model": asked.model,
        "accelerator": asked.accelerator,
        "determinism": "strict",
        "max_sequences": asked.batch,
        "max_model_len": 640,
    }
    mixed = mixed_requests(folder, max(asked.tokens // _TOKENS_OF_AN_ANSWER, 8), 64, seed=1)
    lines, plain = [], None
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Steps take another time than the cost table says")
        costs = Path(scratch) / "costs.json"
        write_steep_costs(costs, EngineConfig(**options))
        num_drafts = ModelConfig.from_folder(folder).dspark_block_size
        for variant in variants(num_drafts, costs):
            if plain is not None and asked.only and asked.only not in variant.name:
                continue
            if asked.stop_after and time.perf_counter() - began > asked.stop_after:
                print(f"{variant.name}: not run, {asked.stop_after:g} s are over", flush=True)
                continue
            found, figures = run(options, variant, mixed)
            plain = found if plain is None else plain
            differ = sum(one != other for one, other in zip(found, plain, strict=True))
            lines.append({**figures, "answers": len(found), "differing": differ})
            said = "equal" if not differ else f"{differ} of {len(found)} answers DIFFER"
            print(f"{variant.name}: {said}, {figures}", flush=True)
    report("speculation_equality", {"variants": lines}, asked.out)
    if any(line["differing"] for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
