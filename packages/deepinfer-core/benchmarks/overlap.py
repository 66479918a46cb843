"""How much of the time the device is busy while the host schedules, on a device in virtual time.

    python packages/deepinfer-core/benchmarks/overlap.py [--steps 600] [--depth 2 1 0]

The scheduler and the loop are the real ones, and the clock runs with the CPU time that this thread
uses for them; the device is fake: a step takes exactly `--ms`, give or take `--jitter`, and its own
work costs nothing. A launch costs `--launch-us` besides what is measured. Requests come without
end, so that the batch stays full: half of them share one of 8 beginnings, a quarter asks for 5
log-probabilities, a fifth has penalties, a fifth a grammar (sampling delayed, masks over 129,280
ids), 1 in 20 is aborted; the cache is `--pressure` smaller than the batch at full length needs. A
request decodes for `--output-steps`: with drafts, of which 70 % are right, it yields more tokens.
With `--text` the client decodes text in this thread; otherwise it appends ids.

    overlap   device busy / time (`overlap_ratio`); waits for a grammar inside a step count as busy
    share     time of the steps run back to back / time; nothing is hidden in it
    ratio     median interval of consecutive decode steps / median of them back to back
    late      steps launched after the device ran dry, by cause
    host      CPU time of an iteration, client included: median and 99th percentile
    evict     iterations with admissions that had to evict published blocks

Prints a table of all cells, one of the parts of the host's time, and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from fake_load import VOCAB, Bench, Mix, Traffic, limits_for, quiet

from deepinfer_core.bench.report import print_table, report
from deepinfer_core.engine.outputs import OutputBuilder
from deepinfer_core.engine.records import StepRecord, device_gaps_ns, overlap_ratio
from deepinfer_core.engine.tokenizer import TextCodec, TextDecoder
from deepinfer_core.model import nano
from deepinfer_core.plans import StepKind
from deepinfer_core.types import Request, SequenceUpdate

ACCEPTED = 0.7  # share of right drafts
TARGET = 0.97


class Clients:
    """Takes what requests yield: ids alone, or text as well."""

    def __init__(self, decoder: Callable[[], TextDecoder | None] | None) -> None:
        """Start with no requests."""
        self.gives_up: dict[int, int] = {}
        self._decoder = decoder
        self._ids: dict[int, list[int]] = {}
        self._builders: dict[int, OutputBuilder] = {}

    def expect(self, request: Request) -> None:
        """Prepare for a request's updates."""
        self._ids[request.uid] = []
        if self._decoder is not None:
            self._builders[request.uid] = OutputBuilder(request, 0, self._decoder())

    def take(self, updates: Sequence[SequenceUpdate]) -> list[int]:
        """Take updates; return the uids whose clients give up now."""
        leaving = []
        for update in updates:
            uid = update.uid
            ids = self._ids[uid]
            ids += update.token_ids
            if self._builders:
                self._builders[uid].feed(update)
            if update.finish_reason is not None:
                del self._ids[uid]
                self._builders.pop(uid, None)
                self.gives_up.pop(uid, None)
            elif len(ids) >= self.gives_up.get(uid, VOCAB):
                del self.gives_up[uid]
                leaving.append(uid)
        return leaving


class Run:
    """One cell: a rank under traffic."""

    def __init__(self, bench: Bench, traffic: Traffic, clients: Clients) -> None:
        """Start with nothing submitted."""
        self.bench, self.traffic, self.clients = bench, traffic, clients
        self.host_ns: list[int] = []
        self.evicting = self.ends = 0
        self._backlog = max(4, bench.limits.num_slots // 16)

    def iterate(self, num_steps: int) -> None:
        """Run the loop for so many steps."""
        bench, scheduler = self.bench, self.bench.scheduler
        records, index = bench.loop.records, scheduler._roster.prefixes.index
        target = _last_step(records.last(1)) + num_steps
        while _last_step(records.last(1)) < target:
            with bench.clock.paused():
                self._arrive()
                evicted, hits = index.evicted_blocks, scheduler.totals.prompt_tokens
            began, waited = bench.clock.now_ns(), bench.clock.waited_ns
            leaving = self._turn()
            spent = bench.clock.now_ns() - began
            with bench.clock.paused():
                self.host_ns.append(spent - (bench.clock.waited_ns - waited))
                admitted = scheduler.totals.prompt_tokens > hits
                self.evicting += admitted and index.evicted_blocks > evicted
                self.ends += admitted
                for uid in leaving:
                    bench.loop.post(partial(scheduler.abort, f"request-{uid}"))

    def _turn(self) -> list[int]:
        return self.clients.take(self.bench.loop.iterate())

    def _arrive(self) -> None:
        """Let requests arrive, so that some always wait."""
        scheduler, loop = self.bench.scheduler, self.bench.loop
        waiting = scheduler.counts().waiting
        for _ in range(self._backlog - waiting):
            request, gives_up = self.traffic.next()
            self.clients.expect(request)
            if gives_up is not None:
                self.clients.gives_up[request.uid] = gives_up
            loop.post(partial(scheduler.submit, request))


def _last_step(records: Sequence[StepRecord]) -> int:
    return records[-1].step_seq if records else 0


def pool_blocks(num_rows: int, mix: Mix, pressure: float) -> int:
    """Return the blocks of a pool that lacks a share of what the batch needs at full length."""
    length = mix.shared * mix.shared_len + sum(mix.prompt_len) / 2 + sum(mix.output_len) / 2
    return round(num_rows * (length / 64 + 0.5) * (1 - pressure))


def measure(
    options: argparse.Namespace, depth: int, step_ms: float, num_rows: int, drafts: int
) -> dict[str, Any]:
    """Run one cell and return its figures."""
    low, high = options.output_steps
    each = sum(ACCEPTED**place for place in range(1 + drafts))  # tokens of a decode row
    mix, decoder, num_ids = Mix(output_len=(round(low * each), round(high * each))), None, VOCAB
    if options.text:
        codec = TextCodec(nano.folder())
        assert codec.tokenizer is not None, "the small model has a tokenizer"
        decoder, num_ids = codec.decoder, codec.tokenizer.get_vocab_size() // 8 * 8
    bench = Bench(
        limits_for(num_rows, pool_blocks(num_rows, mix, options.pressure), drafts),
        depth=depth,
        step_ns=round(step_ms * 1e6),
        launch_ns=round(options.launch_us * 1e3),
        jitter=options.jitter,
        accepts=ACCEPTED,
        num_ids=num_ids,
    )
    run = Run(bench, Traffic(mix, num_ids), Clients(decoder))
    run.iterate(options.warmup)
    with bench.clock.paused():
        gc.collect()
    run.host_ns.clear()
    run.evicting = run.ends = 0
    preempted = bench.scheduler.totals.preemptions
    run.iterate(options.steps)
    bench.scheduler.audit()
    records = [each for each in bench.loop.records.last(options.steps) if each.deferred_end_ns]
    figures: dict[str, Any] = {
        "depth": depth,
        "ms": step_ms,
        "rows": num_rows,
        "drafts": drafts,
        **of_device(bench, records),
        **of_host(run, records),
    }
    figures["evict"] = f"{run.evicting / max(run.ends, 1):.0%}"
    figures["preempt"] = bench.scheduler.totals.preemptions - preempted
    figures["parts"] = parts(bench, records)
    return figures


def of_device(bench: Bench, records: list[StepRecord]) -> dict[str, Any]:
    """Return how busy the device was."""
    forwards = [each.device.forward for each in records if each.device is not None]
    span = forwards[-1][1] - forwards[0][0]
    bare = bench.device.bare_replay_ns(each.step_seq for each in records)
    decode = [
        (later.device.forward[1] - earlier.device.forward[1], work)
        for (earlier, later), work in zip(pairwise(records), bare[1:], strict=True)
        if earlier.kind is later.kind is StepKind.DECODE
        and earlier.device is not None
        and later.device is not None
    ]
    rows = [each.num_sequences for each in records if each.kind is StepKind.DECODE]
    late = Counter(each.bubble for each in records if each.bubble is not None)
    ratio = overlap_ratio(records)
    assert ratio is not None, "the fake device tells its times"
    return {
        "batch": round(sum(rows) / len(rows), 1),
        "prefill": sum(each.kind is StepKind.PREFILL for each in records),
        "overlap": round(ratio, 4),
        "share": round(sum(bare) / span, 4),
        "ratio": round(median(a for a, _ in decode) / median(b for _, b in decode), 4),
        "gap_us": round(float(device_gaps_ns(records).max(initial=0)) / 1e3),
        "late": late.total(),
        "causes": " ".join(f"{cause}:{num}" for cause, num in late.most_common()) or "-",
    }


def of_host(run: Run, records: list[StepRecord]) -> dict[str, Any]:
    """Return what the host did."""
    host = np.array(run.host_ns) / 1e3
    counts = run.bench.device.counts[-len(records) :]
    return {
        "host_us": round(float(np.median(host))),
        "p99_us": round(float(np.quantile(host, 0.99))),
        "waits": round(sum(each.waits for each in counts) / len(counts), 2),
        "allocs": sum(each.allocations for each in counts),
    }


def parts(bench: Bench, records: list[StepRecord]) -> dict[str, float]:
    """Return part of an iteration -> median us; those of all steps, prefill included."""
    found: dict[str, list[int]] = {}
    for record in records:
        lengths = record.parts_ns()
        lengths["settle"] -= bench.loop.records.waited_ns(record)
        lengths["deferred"] = record.deferred_end_ns - record.deferred_begin_ns
        for part, ns in lengths.items():
            found.setdefault(part, []).append(ns)
    return {part: round(median(values) / 1e3, 1) for part, values in found.items()}


def main() -> None:
    """Run all cells and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, nargs="+", default=[2, 8, 25], help="step times")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="batch sizes")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 5], help="most drafts")
    parser.add_argument("--depth", type=int, nargs="+", default=[2, 1, 0])
    parser.add_argument("--steps", type=int, default=600, help="measured steps of a cell")
    parser.add_argument("--warmup", type=int, default=500, help="steps before them")
    parser.add_argument(
        "--output-steps", type=int, nargs=2, default=[128, 512], help="decode steps of a request"
    )
    parser.add_argument("--launch-us", type=float, default=100.0, help="see above")
    parser.add_argument("--jitter", type=float, default=0.05, help="share of the step time")
    parser.add_argument("--pressure", type=float, default=0.3, help="share of the cache lacking")
    parser.add_argument("--text", action="store_true", help="decode text in the same thread")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    where = quiet()
    results = []
    for depth, step_ms, num_rows, drafts in product(
        options.depth, options.ms, options.rows, options.drafts
    ):
        results.append(measure(options, depth, step_ms, num_rows, drafts))
    columns = [name for name in results[0] if name != "parts"]
    print_table(columns, [[each[name] for name in columns] for each in results])
    print("\nmedian us of an iteration's parts, prefill steps included")
    cell = ("depth", "ms", "rows", "drafts")
    names = list(results[0]["parts"])
    print_table(
        (*cell, *names),
        [[*(r[n] for n in cell), *(r["parts"][n] for n in names)] for r in results],
    )
    below = [r for r in results if r["depth"] == 2 and min(r["overlap"], r["share"]) < TARGET]
    print(f"\ncells of depth 2 below {TARGET}: {len(below)}; {where}")
    report("overlap", {"results": results, "below_target": len(below)}, options.out)


if __name__ == "__main__":
    main()
