"""Attention ops at V4.1-Flash shapes: `python benchmarks/attention.py [--only attend]`.

Bytes of `attend` are those of packed entries, each row's own, with queries and outputs; window keys
that rows of a chunk share and entries that two rows pick are counted for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_cuda.attention.attend import attend
from deepinfer_kernels_cuda.attention.compressor import pool_groups
from deepinfer_kernels_cuda.attention.entries import write_entries
from deepinfer_kernels_cuda.attention.window import write_window
from deepinfer_kernels_cuda.quant.entries import encode_entry, round_entry
from deepinfer_kernels_cuda.reference import attention as twin
from deepinfer_kernels_cuda.testing.bench import Case, main

HEADS, CHANNELS, WINDOW, PICKS, DRAFTS, BLOCK = 64, 512, 128, 512, 5, 128
ROWS = (1, 8, 60, 128, 1024, 8192)
CONTEXTS = (4096, 65536, 524288)


def rows_of(count: int, context: int, sequences: int) -> SimpleNamespace:
    """Rows laid out as a step: `count / sequences` of each sequence, the last at `context`."""
    each = count // sequences
    device = "cuda"
    sequence = torch.arange(count, device=device) // each
    first = torch.full((sequences,), context - each, device=device)
    positions = first[sequence] + torch.arange(count, device=device) % each
    return SimpleNamespace(
        positions=positions,
        sequence=sequence,
        slots=sequence.clone(),
        row_start=torch.arange(sequences + 1, device=device) * each,
        first_position=first,
        sequence_slots=torch.arange(sequences, device=device),
        window_first=positions - (WINDOW - 1),
        window_last=positions,
        window_floor=torch.zeros_like(positions),
        window_len=WINDOW,
        writes=torch.ones(count, dtype=torch.bool, device=device),
    )


def rotating(inputs: list[tuple[Any, ...]], op: Callable[..., object]) -> Callable[[], object]:
    """Return a callable that goes through the input sets, so that caches stay cold."""
    turn = [0]

    def run() -> object:
        turn[0] += 1
        return op(*inputs[turn[0] % len(inputs)])

    return run


def block_store(context: int, sequences: int, kind: str, width: int) -> SimpleNamespace:
    """A pool of random entries with a shuffled table; sequences share blocks beyond 2 GiB."""
    per_sequence = -(-context // BLOCK)
    total = min(per_sequence * sequences, max(per_sequence, (2 << 30) // (BLOCK * width)))
    data = torch.empty(total + 1, BLOCK, width, dtype=torch.uint8, device="cuda")
    channels = 512 if kind == "compressed" else 128
    for start in range(0, total + 1, 1024):
        part = data[start : start + 1024]
        part.copy_(encode_entry(kind, torch.randn(*part.shape[:2], channels, device="cuda")))
    order = torch.cat([torch.randperm(total, device="cuda") for _ in range(sequences)])
    table = order[: per_sequence * sequences].reshape(sequences, per_sequence)
    table = torch.cat((table, torch.full((1, per_sequence), total, device="cuda")))
    return SimpleNamespace(data=data, table=table.to(torch.int32).contiguous(), ratio=1)


def random_picks(count: int, context: int) -> Tensor:
    """[count, PICKS] ascending entries; every row its own."""
    if context <= PICKS * 4:
        picks = torch.rand(count, context, device="cuda").topk(PICKS).indices
    else:  # one of each of PICKS even stretches: no two are equal
        stretch = context // PICKS
        picks = torch.arange(PICKS, device="cuda") * stretch
        picks = picks + torch.randint(0, stretch, (count, PICKS), device="cuda")
    return picks.sort(1).values.to(torch.int32)


def attend_cases() -> Iterator[Case]:
    """Sparse attention of decode rows, and of chunks of 1024 rows."""
    sink = torch.randn(HEADS, device="cuda")
    for context in (0, *CONTEXTS):
        entries = None
        for count in ROWS:
            sequences = count if count <= 128 else max(1, count // 1024)
            length = context or 4096
            rows = rows_of(count, length, sequences)
            if context and (entries is None or len(entries.table) <= sequences):
                entries = block_store(context, 128, "compressed", 288)
            sets = []
            for _ in range(4 if count <= 128 else 1):
                queries = torch.randn(count, HEADS, CHANNELS, device="cuda").bfloat16()
                keys = round_entry("window", torch.randn(count, CHANNELS, device="cuda").bfloat16())
                ring = torch.randn(sequences + 1, WINDOW + DRAFTS, CHANNELS, device="cuda")
                window = SimpleNamespace(data=encode_entry("window", ring))
                picks = random_picks(count, context) if context else None
                sets.append((queries, keys, window, picks))

            def run(
                queries: Tensor,
                keys: Tensor,
                window: Any,
                picks: Tensor | None,
                op: Any = attend,
                rows: Any = rows,
                entries: Any = entries,
            ) -> Any:
                return op(
                    queries, keys, window, rows, sink, scale=CHANNELS**-0.5,
                    entries=None if picks is None else entries, picks=picks,
                )  # fmt: skip

            num_picks = PICKS if context else 0
            entry_bytes = WINDOW * 528 + num_picks * (288 + 4)
            yield Case(
                "attend",
                f"{count} rows, " + (f"context {context // 1024}k" if context else "window only"),
                rotating(sets, run),
                bytes=count * (entry_bytes + 4 * HEADS * CHANNELS),
                flops=count * HEADS * (WINDOW + num_picks) * CHANNELS * 4,
                plain=(lambda sets=sets, run=run: run(*sets[0], op=twin.attend))
                if count <= 1024
                else None,
            )


def write_cases() -> Iterator[Case]:
    """What writes caches or rounds to their formats."""
    for count in ROWS:
        sequences = count if count <= 128 else count // 1024
        rows = rows_of(count, 8192, sequences)
        keys = torch.randn(count, CHANNELS, device="cuda").bfloat16()
        ring = torch.zeros(sequences + 1, WINDOW + DRAFTS, 528, dtype=torch.uint8, device="cuda")
        window = SimpleNamespace(data=ring)
        stored = min(count, sequences * (WINDOW + DRAFTS))
        yield Case(
            "write_window", f"{count} rows", lambda w=window, k=keys, r=rows: write_window(w, k, r),
            bytes=stored * (1024 + 528),
            plain=lambda w=window, k=keys, r=rows: twin.write_window(w, k, r),
        )  # fmt: skip
        for kind, channels, width in (("compressed", 512, 288), ("index", 128, 68)):
            store = block_store(8192, sequences, kind, width)
            x = torch.randn(count, channels, device="cuda").bfloat16()
            yield Case(
                f"write_entries {kind}", f"{count} rows",
                lambda s=store, x=x, r=rows, k=kind: write_entries(s, x, r, k),
                bytes=count * (2 * channels + width),
                plain=lambda s=store, x=x, r=rows, k=kind: twin.write_entries(s, x, r, k),
            )  # fmt: skip
        values, gates = (torch.randn(count, CHANNELS, device="cuda") for _ in range(2))
        state = SimpleNamespace(data=torch.randn(sequences + 1, 7, 2, CHANNELS, device="cuda"))
        yield Case(
            "pool_groups", f"{count} rows",
            lambda v=values, g=gates, s=state, r=rows: pool_groups(v, g, s, r),
            bytes=count * CHANNELS * 4 * 3,
        )  # fmt: skip
        yield Case(
            "round_window", f"{count} rows", lambda k=keys: round_entry("window", k),
            bytes=count * 2048,
        )  # fmt: skip
        iq = torch.randn(count, 32, 128, device="cuda").bfloat16()
        yield Case(
            "round_index", f"{count} rows", lambda q=iq: round_entry("index", q),
            bytes=count * 32 * 128 * 4,
        )  # fmt: skip


def cases() -> Iterator[Case]:
    """All cases of the family."""
    yield from attend_cases()
    yield from write_cases()


if __name__ == "__main__":
    main(cases)
