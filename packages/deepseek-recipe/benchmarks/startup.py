"""Time until a request can be taken, and time of a small request: import, parse, convert, render.

    python packages/deepseek-recipe/benchmarks/startup.py [--peer PYTHON] [--out FILE]

Imports run in fresh interpreters, by turns with bare ones; what is reported is the best time above
the best bare one. The small request has a system and a user message, thinking off. Prints a table,
then one JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from report import facts

from deepseek_recipe import convert, parse, render

# The peer has the same import name: its interpreter must not find ours.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
SOURCES = str(Path(__file__).resolve().parents[1] / "src")
IMPORTS = {
    "import deepseek_recipe": "import deepseek_recipe",
    "... and all of the request and reply side": "from deepseek_recipe import parse, ReplyMachine",
}
BODIES = {
    "chat": {
        "model": "DeepSeek-V4-Pro",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Plan a two-day trip to Kyoto."},
        ],
        "thinking": {"type": "disabled"},
    },
    "responses": {
        "model": "DeepSeek-V4-Pro",
        "instructions": "You are a helpful assistant.",
        "input": "Plan a two-day trip to Kyoto.",
        "reasoning": {"effort": "none"},
    },
    "messages": {
        "model": "DeepSeek-V4-Pro",
        "max_tokens": 256,
        "system": "You are a helpful assistant.",
        "messages": [{"role": "user", "content": "Plan a two-day trip to Kyoto."}],
        "thinking": {"type": "disabled"},
    },
}
PEER = """
import json, sys, time
import deepseek_recipe as peer
request, body = sys.argv[1], sys.argv[2]
options, encoding = peer.ConversionOptions(), peer.DeepseekV4Encoding()
best = 1e9
for _ in range(3000):
    begin = time.perf_counter()
    converted = getattr(peer, request)(body).convert(options)
    encoding.render_conversation(converted.conversation)
    best = min(best, time.perf_counter() - begin)
print(best)
"""
PEER_NAMES = {
    "chat": "ChatCompletionRequest",
    "responses": "ResponsesRequest",
    "messages": "MessagesRequest",
}


def interpreter(python: str, code: str, path: str | None) -> float:
    """Return the seconds of a fresh interpreter that runs `code`."""
    before = "" if path is None else f"import sys; sys.path.insert(0, {path!r}); "
    begin = time.perf_counter()
    subprocess.run([python, "-c", before + code], check=True, env=ENVIRONMENT)
    return time.perf_counter() - begin


def import_row(case: str, code: str, peer: str | None, runs: int) -> dict[str, object]:
    """Measure an import of ours, and of the peer if there is one."""
    bare, ours, peer_bare, theirs = [], [], [], []
    for _ in range(runs):
        bare.append(interpreter(sys.executable, "pass", SOURCES))
        ours.append(interpreter(sys.executable, code, SOURCES))
        if peer is not None:
            peer_bare.append(interpreter(peer, "pass", None))
            theirs.append(interpreter(peer, "import deepseek_recipe", None))
    row: dict[str, object] = {"case": case, "ours_us": (min(ours) - min(bare)) * 1e6}
    if peer is not None:
        row["peer_us"] = (min(theirs) - min(peer_bare)) * 1e6
    return row


def best_us(run: Callable[[], object], runs: int = 3000) -> float:
    """Return the best time of a call in microseconds."""
    best = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def request_row(protocol: str, peer: str | None) -> dict[str, object]:
    """Measure a small request of a protocol, from the bytes of its body to the prompt."""
    body = json.dumps(BODIES[protocol])
    data = body.encode()

    def ours() -> object:
        converted = convert(parse(protocol, data))
        return render(converted.conversation, converted.profile)

    row: dict[str, object] = {"case": f"{protocol}: body to prompt", "ours_us": best_us(ours)}
    if peer is not None:
        command = [peer, "-c", PEER, PEER_NAMES[protocol], body]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        if done.returncode == 0:
            row["peer_us"] = float(done.stdout) * 1e6
        else:
            print(done.stderr, file=sys.stderr)
    return row


def main() -> None:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has the peer")
    parser.add_argument("--runs", type=int, default=15, help="of each import; the best counts")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    rows = [import_row(*each, arguments.peer, arguments.runs) for each in IMPORTS.items()]
    rows += [request_row(protocol, arguments.peer) for protocol in BODIES]
    print(f"{'case':44}{'ours us':>10}{'peer us':>10}")
    for row in rows:
        peer = f"{row['peer_us']:10.1f}" if "peer_us" in row else ""
        print(f"{row['case']:44}{row['ours_us']:10.1f}{peer}")
    where = facts("in its own process" if arguments.peer else None)
    lines = [json.dumps({**row, **where}) for row in rows]
    print("\n".join(lines))
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
