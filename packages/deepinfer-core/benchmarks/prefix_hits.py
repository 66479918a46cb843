"""What a prefix hit leaves to compute, whatever the context, and how often conversations hit.

    python packages/deepinfer-core/benchmarks/prefix_hits.py [--lengths 1000 10000]

The first table: the same prompt twice. The second time at most one block is computed, and at most
`window` rows are replayed for the windows: on the CPU with a small random model of window 128, and
with 100,000 tokens on the fake device, which also checks every position that is read. The second
table: conversations of several turns, each prompt the whole conversation so far, some with a common
system prompt, turns of all of them mixed; the cache holds everything (loose) or a part (tight).

    rows       computed in prefill steps, replayed ones included
    hit rate   prompt tokens found in the prefix index / prompt tokens; `most` is what whole blocks
               of earlier prompts and replies allow
    cache      its size, as a share of all that is said
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_load import VOCAB, Bench, limits_for

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.bench.make_checkpoint import write_checkpoint
from deepinfer_core.bench.presets import yarn
from deepinfer_core.bench.report import print_table, report
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.tiny_model import tiny_config
from deepinfer_core.types import Request

WINDOW, BLOCK_SIZE = 128, 64
CONCURRENT = 8


def small_config(max_len: int) -> dict[str, Any]:
    """Return the smallest model with every kind of layer, a window of 128 and a long context."""
    return tiny_config(
        max_position_embeddings=max_len,
        rope_scaling=yarn(factor=max_len / 1024, original=1024),
        sliding_window=WINDOW,
        index_topk=64,
        candidate_topk_blocks=16,
        candidate_block_size=4,
    )


def on_cpu(lengths: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield the figures of prompts given twice to the engine on the CPU."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, max_len = Path(scratch) / "model", 1024 * -(-(max(lengths) + 64) // 1024)
        write_checkpoint(folder, small_config(max_len), seed=0)
        with LLM(
            folder,
            accelerator="cpu",
            max_model_len=max_len,
            max_sequences=1,
            block_size=BLOCK_SIZE,
            max_step_tokens=1024,
        ) as llm:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0))
            for length in lengths:
                prompt = np.random.default_rng(length).integers(8, 380, length).tolist()
                for turn in ("first", "again"):
                    before, began = llm.engine.stats.prefill_tokens, time.perf_counter()
                    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
                    output = llm.generate([prompt], params)[0]
                    seconds = time.perf_counter() - began
                    rows = llm.engine.stats.prefill_tokens - before
                    cached = output.num_cached_tokens
                    yield _line("cpu", length, turn, cached, rows, round(seconds * 1e3, 1))


def on_fake(length: int) -> Iterator[dict[str, object]]:
    """Yield the figures of a prompt given twice to the scheduler over the fake device."""
    limits = limits_for(1, length // BLOCK_SIZE + 8, 0, length + 64)
    bench = _checked(limits)
    prompt = tuple(np.random.default_rng(length).integers(8, VOCAB, length).tolist())
    for uid, turn in enumerate(("first", "again")):
        totals = bench.scheduler.totals
        rows, hits = totals.chunk_tokens, totals.hit_tokens
        bench.scheduler.submit(_request(uid, prompt, 1))
        while bench.loop.has_work:
            bench.loop.iterate()
        yield _line("fake", length, turn, totals.hit_tokens - hits, totals.chunk_tokens - rows, "-")


def _line(
    device: str, length: int, turn: str, cached: int, rows: int, ms: object
) -> dict[str, object]:
    line: dict[str, object] = {
        "device": device,
        "tokens": length,
        "prompt": turn,
        "cached": cached,
        "computed": length - cached,
        "replayed": rows - (length - cached),
        "rows": rows,
        "ms": ms,
    }
    within = length - cached <= BLOCK_SIZE and rows - (length - cached) <= WINDOW
    return {**line, "within": "-" if turn == "first" else "yes" if within else "NO"}


def _checked(limits: SchedulerLimits) -> Bench:
    """Return a rank whose device compares all content it reads."""
    bench = Bench(limits, accepts=0.0)
    bench.device.model.checks = "all"
    return bench


def _request(uid: int, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(
        uid=uid,
        client_id=f"request-{uid}",
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        seed=uid,
        replay_encoder=True,
        replay_decoder=True,
    )


class Conversation:
    """Turns of one user: a prompt is all that was said before, and a new question."""

    def __init__(self, draw: np.random.Generator, system: list[int], num_turns: int) -> None:
        """Start with the system prompt, which may be empty."""
        self._draw, self.said, self.turns_left = draw, list(system), num_turns
        self.known_len = len(system)  # tokens at the front that some earlier prompt or reply had

    def ask(self) -> tuple[tuple[int, ...], int]:
        """Return the next prompt and the length of its reply."""
        self.turns_left -= 1
        self.said += self._draw.integers(8, VOCAB, int(self._draw.integers(32, 257))).tolist()
        return tuple(self.said), int(self._draw.integers(32, 129))


def trace(share: float, num_conversations: int, num_turns: int, seed: int) -> dict[str, object]:
    """Run conversations over a cache that holds a share of what all of them say."""
    draw = np.random.default_rng(seed)
    systems = [draw.integers(8, VOCAB, 512).tolist() for _ in range(2)]
    # A third of them each has one of two system prompts, the others none.
    waiting = [
        Conversation(draw, [*systems, []][number % 3], num_turns)
        for number in range(num_conversations)
    ]
    said = num_conversations * num_turns * (144 + 80) + sum(map(len, systems))
    max_len = 512 + num_turns * (256 + 128) + BLOCK_SIZE
    num_blocks = max(round(share * said / BLOCK_SIZE), max_len // BLOCK_SIZE + 1)
    bench = _checked(limits_for(CONCURRENT, num_blocks, max_model_len=max_len))
    running: dict[int, Conversation] = {}
    asked = most = uid = 0
    seen: set[int] = set()
    while waiting or running:
        while waiting and len(running) < CONCURRENT:
            speaker = waiting.pop(int(draw.integers(len(waiting))))
            prompt, reply_len = speaker.ask()
            first = speaker.turns_left == num_turns - 1
            known = speaker.known_len
            if first and known:  # the first conversation with a system prompt computes it
                known = known if prompt[0] in seen else 0
                seen.add(prompt[0])
            asked, most = asked + len(prompt), most + known // BLOCK_SIZE * BLOCK_SIZE
            bench.scheduler.submit(_request(uid, prompt, reply_len))
            running[uid], uid = speaker, uid + 1
        for update in bench.loop.iterate():
            speaker = running[update.uid]
            speaker.said += update.token_ids
            if update.finish_reason is not None:
                speaker.known_len = len(speaker.said) - 1  # the last token was never fed
                del running[update.uid]
                if speaker.turns_left:
                    waiting.append(speaker)
    bench.loop.flush()
    bench.scheduler.audit()
    totals = bench.scheduler.totals
    return {
        "cache": f"{share:.0%}",
        "blocks": num_blocks,
        "prompts": uid,
        "prompt_tokens": asked,
        "hit_rate": round(totals.hit_tokens / totals.prompt_tokens, 4),
        "most": round(most / asked, 4),
        "rows": totals.chunk_tokens,
        "replayed": totals.replayed_tokens,
        "evicted_blocks": bench.scheduler.counts().evicted_blocks,
        "preemptions": totals.preemptions,
    }


def main() -> None:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 10_000], help="on the CPU")
    parser.add_argument("--fake", type=int, default=100_000, help="tokens on the fake device")
    parser.add_argument("--conversations", type=int, default=36)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--cache", type=float, nargs="+", default=[1.2, 0.6, 0.3], help="share of all that is said"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the conversations")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    twice = [*on_cpu(options.lengths), *on_fake(options.fake)]
    _print(twice)
    print()
    turns = [
        trace(share, options.conversations, options.turns, options.seed) for share in options.cache
    ]
    _print(turns)
    beyond = sum(line["within"] == "NO" for line in twice)
    print(f"\nhits beyond one block and {WINDOW} replayed rows: {beyond}")
    report("prefix_hits", {"twice": twice, "turns": turns, "beyond": beyond}, options.out)


def _print(lines: Sequence[dict[str, object]]) -> None:
    columns = list(lines[0])
    print_table(columns, [[line[column] for column in columns] for line in lines])


if __name__ == "__main__":
    main()
