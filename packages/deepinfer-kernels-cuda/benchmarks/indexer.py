"""The indexer at V4.1-Flash shapes: `python benchmarks/indexer.py [--only index_scores]`.

`index_scores` is scoring alone, `index_pick` and `index_publish` the choice of 512 entries and of
2048 blocks from given scores, `index_select` the whole op. Bytes are those of packed keys (68 each,
once for all rows of a sequence); operations are 2 * 32 * 128 a row and visible entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from deepinfer_kernels_cuda.attention.index_scores import index_scores, score_plan
from deepinfer_kernels_cuda.attention.index_select import WORKSPACE_BYTES, index_select
from deepinfer_kernels_cuda.attention.select import select
from deepinfer_kernels_cuda.quant.entries import encode_entry, round_entry
from deepinfer_kernels_cuda.reference import indexer as twin
from deepinfer_kernels_cuda.testing.bench import Case, main

HEADS, CHANNELS, WIDTH, BLOCK, CANDIDATE = 32, 128, 68, 128, 8
TOP_K, PUBLISH = 512, 2048
COLD_BYTES = 150e6  # keys that calls go through in turn

# sequences, rows of each, tokens of context, tokens an entry stands for
SHAPES = [
    *((count, 1, context, 1) for context in (4096, 65536, 524288) for count in (1, 8, 60, 128)),
    *((count, 1, 65536, 2) for count in (1, 60, 128)),
    (60, 6, 65536, 1),
    (1, 1024, 4096, 1),
    *((1, rows, 65536, 1) for rows in (1024, 8192)),
    (1, 1024, 524288, 1),
    (1, 8192, 65536, 2),
]


@dataclass
class Inputs:
    """A step whose sequences move through the slots of a store, call by call."""

    queries: Tensor
    weights: Tensor
    keys: SimpleNamespace
    steps: list[SimpleNamespace]
    turn: int = 0

    def rows(self) -> SimpleNamespace:
        """Return the next step's rows."""
        self.turn += 1
        return self.steps[self.turn % len(self.steps)]


def inputs_of(sequences: int, each: int, context: int, ratio: int) -> Inputs:
    """Return random queries, weights and stored keys."""
    count, device = context // ratio, "cuda"
    copies = max(1, min(64, round(COLD_BYTES / (sequences * count * WIDTH))))
    per_block = BLOCK // ratio
    slots, blocks = sequences * copies, count // per_block
    data = torch.empty(slots * blocks + 1, per_block, WIDTH, dtype=torch.uint8, device=device)
    for part in data.split(1 << 12):
        part.copy_(encode_entry("index", torch.randn(*part.shape[:2], CHANNELS, device=device)))
    table = torch.randperm(slots * blocks, device=device).int().reshape(slots, blocks)
    rows = sequences * each
    sequence = torch.arange(rows, device=device) // each
    positions = context - each + torch.arange(rows, device=device) % each
    steps = [
        SimpleNamespace(
            positions=positions,
            sequence=sequence,
            slots=sequence + copy * sequences,
            sequence_slots=torch.arange(sequences, device=device) + copy * sequences,
        )
        for copy in range(copies)
    ]
    queries = torch.randn(rows, HEADS, CHANNELS, device=device).bfloat16()
    weights = torch.randn(rows, HEADS, device=device).bfloat16() / 64
    store = SimpleNamespace(data=data, table=table, ratio=ratio)
    return Inputs(round_entry("index", queries), weights, store, steps)


def scoring(inputs: Inputs, candidates: Tensor | None, part: slice) -> Callable[[], object]:
    """Return a call that scores some rows."""
    rows, store = inputs.queries.shape[0], inputs.keys
    sequences = inputs.steps[0].sequence_slots.shape[0]
    plan = score_plan(
        rows, sequences, store.data.shape[1], candidates is not None, store.data.device
    )

    def run() -> object:
        return index_scores(
            inputs.queries, inputs.weights, store, inputs.rows(), candidates, CANDIDATE, plan, part
        )

    return run


def choosing(inputs: Inputs, part: slice, top_k: int, blocks: bool) -> Callable[[], object]:
    """Return a call that chooses from scores of some rows."""
    scores = scoring(inputs, None, part)()
    rows = inputs.steps[0]
    out = torch.empty(part.stop, top_k, dtype=torch.int32, device="cuda")

    def run() -> object:
        return select(
            scores, rows.sequence[part], rows.positions[part], ratio=inputs.keys.ratio,
            top_k=top_k, candidates=None, candidate_block=CANDIDATE, blocks=blocks, out=out,
        )  # fmt: skip

    return run


def whole(module: Callable[..., object], inputs: Inputs, **options: object) -> Callable[[], object]:
    """Return a call of `index_select` or of its twin."""
    settings = {"top_k": TOP_K, "candidates": None, "candidate_block": CANDIDATE, "publish": 0}
    settings |= options
    return lambda: module(inputs.queries, inputs.weights, inputs.keys, inputs.rows(), **settings)


def cases() -> Iterator[Case]:
    """Yield the cases of the family."""
    for sequences, each, context, ratio in SHAPES:
        inputs = inputs_of(sequences, each, context, ratio)
        rows, count = sequences * each, context // ratio
        shape = f"{sequences} x {each} rows, {context // 1024}k" + (" / 2" if ratio == 2 else "")
        # A call holds scores of this many rows at most; the figures are of one such part.
        at_once = WORKSPACE_BYTES // (count * 9 // 4) // 8 * 8
        part = slice(0, min(rows, at_once))
        share = part.stop / rows
        visible = [(context - each + row % each + 1) // ratio for row in range(rows)]
        moved = -(-part.stop // each) * count * WIDTH
        work = sum(visible[part]) * 2.0 * HEADS * CHANNELS
        small = rows * count <= 64 * 65536
        note = "" if share == 1 else f"{part.stop} rows of them"
        yield Case("index_scores", shape, scoring(inputs, None, part), moved, work, note=note)
        yield Case("index_pick", shape, choosing(inputs, part, TOP_K, False), 0.0, note=note)
        total = sum(visible) * 2.0 * HEADS * CHANNELS
        plain = whole(twin.index_select, inputs) if small else None
        yield Case(
            "index_select", shape, whole(index_select, inputs), sequences * count * WIDTH, total,
            plain=plain,
        )  # fmt: skip
        if ratio == 1 and context >= 65536:
            yield Case(
                "index_publish", shape, choosing(inputs, part, PUBLISH, True), 0.0, note=note
            )
            blocks = torch.randperm(count // CANDIDATE, device="cuda")[:PUBLISH].sort().values
            candidates = blocks.int().expand(rows, -1).contiguous()
            picked = PUBLISH * CANDIDATE
            yield Case(
                "index_select, candidates", shape,
                whole(index_select, inputs, candidates=candidates),
                rows * picked * WIDTH, rows * picked * 2.0 * HEADS * CHANNELS,
            )  # fmt: skip
        del inputs, plain


if __name__ == "__main__":
    main(cases)
