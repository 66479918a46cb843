"""Linear layers of V4.1-Flash: `python benchmarks/linear.py [--only NAME] [--out FILE]`.

Bounds of `fp8_linear` are of the block-scaled fp8 ceiling. Multiplying in fp8 would need one
float32 multiply-add an output and 32 columns on the CUDA cores, and half a multiplication for its
factor, which caps a perfectly overlapped kernel at 2/3 of the tensor cores' own rate; the kernels
here multiply in bfloat16 instead, whose ceiling is 780 of the 1258 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from types import SimpleNamespace

import torch
from torch import Tensor

from deepinfer_kernels_cuda.linear.embed import embed
from deepinfer_kernels_cuda.linear.float32_linear import linear_float32
from deepinfer_kernels_cuda.linear.fp8_linear import fp8_linear
from deepinfer_kernels_cuda.linear.grouped_linear import grouped_linear
from deepinfer_kernels_cuda.linear.plain_linear import plain_linear
from deepinfer_kernels_cuda.quant.activations import round_fp8, round_fp8_wide
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix, prepare_matrix
from deepinfer_kernels_cuda.reference import linear as twin
from deepinfer_kernels_cuda.testing.bench import Case, main

ROWS = (1, 8, 60, 128, 1024, 8192)
CACHE_BYTES = 120_000_000  # weights are rotated until they pass twice the L2 cache
FP8 = {
    "engram.wkv": (25600, 6144),
    "main_proj": (5120, 15360),
    "wq_b": (32768, 1280),
    "wo_b": (5120, 8192),
    "shared.w1": (2304, 5120),
    "shared.w2": (5120, 2304),
    "wq_a": (1280, 5120),
    "index.wq_b": (4096, 1280),
    "wkv": (512, 5120),
}
PLAIN = {"index.weights": (32, 5120), "index.wk": (128, 512), "compressor.wkv": (512, 5120)}
FLOAT32 = {
    "head": (129280, 5120),
    "markov.head": (129280, 256),
    "gate": (384, 5120),
    "compressor": (512, 5120),
    "confidence": (1, 5376),
}


def draw(rows: int, columns: int) -> Tensor:
    """Return random bfloat16 rows."""
    return torch.randn(rows, columns, device="cuda").bfloat16()


def draw_fp8(outputs: int, columns: int) -> PreparedMatrix:
    """Return a random fp8 weight in panels."""
    payload = torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16) * 60
    scale = torch.randint(112, 119, (outputs // 32, columns // 32), device="cuda")
    stored = SimpleNamespace(
        payload=payload.clamp_(-448, 448).to(torch.float8_e4m3fn),
        scale=scale.to(torch.uint8),
        format="fp8_tile",
        shape=(outputs, columns),
    )
    return prepare_matrix(stored, "cuda")


def draw_plain(outputs: int, columns: int) -> PreparedMatrix:
    """Return a random bfloat16 weight."""
    stored = SimpleNamespace(
        payload=draw(outputs, columns), scale=None, format="plain", shape=(outputs, columns)
    )
    return prepare_matrix(stored, "cuda")


def several(make: Callable[[], PreparedMatrix]) -> list[PreparedMatrix]:
    """Return as many weights as pass the cache, at least one."""
    first = make()
    copies = CACHE_BYTES // (first.payload.nbytes + 1)
    return [first, *(make() for _ in range(min(copies, 63)))]


def rotating(run: Callable[[PreparedMatrix], object], weights: list[PreparedMatrix]):
    """Return a call that goes to the next weight each time."""
    turn = cycle(weights)
    return lambda: run(next(turn))


def cases() -> Iterator[Case]:
    """Yield every case, freeing the weights of the ones before."""
    for rows in (1, 60, 8192):
        x = draw(rows, 5120)
        yield Case("round_fp8", f"{rows}x5120", lambda x=x: round_fp8(x), 3.03 * x.numel())
        yield Case("round_fp8_wide", f"{rows}x5120", lambda x=x: round_fp8_wide(x), 4 * x.numel())
    for name, (outputs, columns) in FP8.items():
        weights = several(lambda o=outputs, c=columns: draw_fp8(o, c))
        dense = twin.widen(weights[0]).bfloat16()
        for rows in ROWS:
            x = draw(rows, columns)
            yield Case(
                f"fp8_linear {name}",
                f"{rows} x {outputs}x{columns}",
                rotating(lambda w, x=x: fp8_linear(x, w, strict=False), weights),
                weights[0].payload.nbytes + 2 * rows * (outputs + columns),
                2 * rows * outputs * columns,
                compute="fp8_block",
                plain=lambda x=x, d=dense: x @ d.T,
            )
            if rows >= 1024:
                yield Case(
                    f"fp8_linear strict {name}",
                    f"{rows} x {outputs}x{columns}",
                    rotating(lambda w, x=x: fp8_linear(x, w), weights),
                    weights[0].payload.nbytes + 2 * rows * (outputs + columns),
                    2 * rows * outputs * columns,
                    compute="fp8_block",
                )
        del weights, dense
    yield from _others()


def _others() -> Iterator[Case]:
    weights = several(lambda: draw_fp8(8192, 4096))
    for rows in ROWS:
        x = draw(rows, 8 * 4096).view(rows, 8, 4096)
        yield Case(
            "grouped_linear wo_a",
            f"{rows} x 8 x 1024x4096",
            rotating(lambda w, x=x: grouped_linear(x, w, strict=False), weights),
            weights[0].payload.nbytes + 2 * rows * (8 * 4096 + 8192),
            2 * rows * 8192 * 4096,
        )
    for names, op in ((PLAIN, plain_linear), (FLOAT32, linear_float32)):
        for name, (outputs, columns) in names.items():
            weights = several(lambda o=outputs, c=columns: draw_plain(o, c))
            for rows in (n for n in ROWS if outputs <= 100000 or n <= 512):
                x = draw(rows, columns)
                size = 2 if op is plain_linear else 4
                yield Case(
                    f"{op.__name__} {name}",
                    f"{rows} x {outputs}x{columns}",
                    rotating(lambda w, x=x, op=op: op(x, w), weights),
                    weights[0].payload.nbytes + rows * (size * outputs + 2 * columns),
                    2 * rows * outputs * columns,
                    plain=lambda x=x, w=weights[0]: x @ w.payload.T,
                )
            del weights
    table = draw_plain(129280, 5120)
    for rows in ROWS:
        ids = torch.randint(0, 129280, (rows,), device="cuda")
        yield Case(
            "embed",
            f"{rows} x 5120",
            lambda i=ids: embed(i, table),
            4 * rows * 5120,
            plain=lambda i=ids: table.payload[i],
        )


if __name__ == "__main__":
    main(cases)
