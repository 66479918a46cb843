"""Answers that must have a form: valid, and the same without drafts, with them, and one step ahead.

    python packages/deepinfer-core/benchmarks/constrained_equality.py [--count 500]

Strict. Schemas, regexes, grammars, tool calls, choices and plain completions in turn, half of the
conversations with reasoning. A line for each variant: answers that have their form as judged by
code that knows nothing of masks, answers that ran out of tokens, answers that differ from those of
the first variant, tokens of a sequence and step, and the time that steps stood still for masks.
Ends with status 1 unless all answers are right and equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deepinfer_core import LLM
from deepinfer_core.bench.report import report
from deepinfer_core.testing.constrained_requests import (
    Answer,
    ConstrainedRequest,
    answers_of,
    constrained_requests,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "off, depth 0": {"speculation": "off", "depth": 0},
    "off, depth 2": {"speculation": "off", "depth": 2},
    "drafts, depth 0": {"depth": 0},
    "drafts, depth 2": {"depth": 2},
}


def run(
    options: dict[str, Any], requests: list[ConstrainedRequest]
) -> tuple[list[Answer], dict[str, object]]:
    """Return the answers of one variant, and what it took."""
    began = time.perf_counter()
    with LLM(**options) as llm:
        found = answers_of(llm, requests)
        llm.engine.audit()
        families = llm.engine.metrics()
        stalled = sum(
            record.device.stalled_ns
            for record in llm.engine.records.last(100_000)
            if record.device is not None
        )
    rows, yielded, drafts = (
        sum(families[name].values.values())
        for name in ("decode_rows", "yielded_tokens", "verified_tokens")
    )
    figures = {
        "tokens": sum(len(each.token_ids) for each in found),
        "tokens_per_row": round(yielded / rows, 3),
        "drafts_per_row": round(drafts / rows, 3),
        "stalled_ms": round(stalled * 1e-6, 1),
        "seconds": round(time.perf_counter() - began, 1),
    }
    return found, figures


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description="Constrained answers: valid and equal.")
    parser.add_argument("--count", type=int, default=500, help="requests (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-sequences", type=int, default=32)
    parser.add_argument("--only", default="", help="variants whose names have this in them")
    parser.add_argument("--accelerator", default=None)
    parser.add_argument("--out", type=Path, default=None, help="file to append JSON lines to")
    given = parser.parse_args()
    requests = constrained_requests(given.count, given.seed)
    first: list[Answer] | None = None
    failed = False
    for name, options in VARIANTS.items():
        if first is not None and given.only not in name:
            continue
        answers, figures = run(
            {
                "accelerator": given.accelerator,
                "determinism": "strict",
                "max_sequences": given.max_sequences,
                "max_model_len": 2048,
                **options,
            },
            requests,
        )
        first = first or answers
        wrong = [
            (request.kind, answer.fault)
            for request, answer in zip(requests, answers, strict=True)
            if answer.fault is not None and answer.ended != "length"
        ]
        cut = sum(answer.ended == "length" for answer in answers)
        differing = [place for place, a in enumerate(first) if a != answers[place]]
        kinds = Counter(request.kind for request in requests)
        failed = failed or bool(wrong or differing)
        line = {
            "variant": name,
            "answers": len(answers),
            "valid": len(answers) - len(wrong) - cut,
            "out_of_tokens": cut,
            "unequal": len(differing),
            **figures,
            "kinds": dict(kinds),
        }
        report("constrained_equality", line, given.out)
        for kind, fault in wrong[:10]:
            print(f"  {kind}: {fault}", file=sys.stderr)
        for place in differing[:10]:
            print(f"  {place}: {first[place]}\n  {answers[place]}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
