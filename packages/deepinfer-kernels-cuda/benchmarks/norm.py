"""Norms, rotary embedding and hyper-connections at V4.1-Flash sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from deepinfer_kernels_cuda.mhc.collapse import (
    mhc_collapse,
    mhc_collapse_norm,
    mhc_collapse_norm_fp8,
)
from deepinfer_kernels_cuda.mhc.merge import mhc_merge
from deepinfer_kernels_cuda.mhc.merge_norm import mhc_merge_norm_fp8
from deepinfer_kernels_cuda.mhc.mix import mhc_mix
from deepinfer_kernels_cuda.norm.rms_norm import rms_norm, rms_norm_fp8
from deepinfer_kernels_cuda.norm.rotate import rotate
from deepinfer_kernels_cuda.reference import mhc as mhc_twins
from deepinfer_kernels_cuda.reference import norm as norm_twins
from deepinfer_kernels_cuda.testing.bench import Case, main

SIZE, STREAMS, OUT = 5120, 4, 24
ROWS = (1, 8, 60, 128, 1024, 8192)
EPS = 1e-20
SETTINGS = {"norm_eps": EPS, "eps": 1e-6, "iterations": 20}


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _cycle(op: Callable[..., object], sets: list[tuple]) -> Callable[[], object]:
    """Return a call of the op that takes the next inputs every time: the cache stays cold."""
    turn = itertools.cycle(sets)
    return lambda: op(*next(turn))


def _sets(make: Callable[[], tuple], size: float) -> list[tuple]:
    """Return enough sets of inputs of `size` bytes for 200 MB, 20 at most."""
    return [make() for _ in range(max(1, min(20, int(2e8 / size))))]


def _case(op, twin, shape, make, read, written, flops=0.0, **settings) -> Case:
    sets = _sets(make, read)
    return Case(
        op.__name__.removeprefix("_"),
        shape,
        _cycle(lambda *inputs: op(*inputs, **settings), sets),
        bytes=read + written,
        flops=flops,
        plain=_cycle(lambda *inputs: twin(*inputs, **settings), sets),
    )


def cases() -> Iterator[Case]:
    """Yield every op of the family at every number of rows."""
    for rows, size in [*((n, SIZE) for n in ROWS), (8192, 1280), (8192, 512), (8192, 128)]:
        inputs = rows * size * 2
        weight = _random(size)

        def make(rows=rows, size=size, weight=weight):
            return _random(rows, size), weight, EPS

        shape = f"{rows} x {size}"
        yield _case(rms_norm, norm_twins.rms_norm, shape, make, inputs, inputs)
        written = inputs + rows * size * 33 // 32
        yield _case(rms_norm_fp8, norm_twins.rms_norm_fp8, shape, make, inputs, written)

    for rows, heads, size in [(n, 64, 512) for n in ROWS] + [(8192, 1, 512), (8192, 32, 128)]:
        frequencies = 1.0 / 10000 ** (torch.arange(32, device="cuda") / 32)
        positions = torch.randint(0, 1 << 20, (rows,), device="cuda")

        def make(shape=(rows, heads, size), positions=positions, frequencies=frequencies):
            return _random(*shape), positions, frequencies

        moved = rows * heads * size * 2
        yield _case(rotate, norm_twins.rotate, f"{rows} x {heads} x {size}", make, moved, moved)

    for rows in ROWS:
        yield from _hyper_connections(rows)


def _hyper_connections(rows: int) -> Iterator[Case]:
    shape, wide, narrow = f"{rows} x {STREAMS} x {SIZE}", rows * STREAMS * SIZE * 2, rows * SIZE * 2
    coefficient = torch.rand(rows, STREAMS, device="cuda")
    comb = torch.rand(rows, STREAMS, STREAMS, device="cuda")
    weight = _random(SIZE)
    scale, base = torch.rand(3, device="cuda"), torch.rand(OUT, device="cuda")

    def mixed():
        fn = _random(OUT, STREAMS * SIZE, dtype=torch.float32) * 0.01
        return _random(rows, STREAMS, SIZE), fn, scale, base

    def collapsed():
        return coefficient, _random(rows, STREAMS, SIZE)

    def normed():
        return coefficient, _random(rows, STREAMS, SIZE), weight, EPS

    def merged():
        return _random(rows, SIZE), coefficient, comb, _random(rows, STREAMS, SIZE)

    product = 2.0 * rows * OUT * STREAMS * SIZE
    read = wide + OUT * STREAMS * SIZE * 4
    yield _case(mhc_mix, mhc_twins.mhc_mix, shape, mixed, read, 96 * rows, product, **SETTINGS)
    yield _case(mhc_collapse, mhc_twins.mhc_collapse, shape, collapsed, wide, narrow)
    yield _case(mhc_collapse_norm, mhc_twins.mhc_collapse_norm, shape, normed, wide, narrow)
    twin, written = mhc_twins.mhc_collapse_norm_fp8, narrow + rows * SIZE * 33 // 32
    yield _case(mhc_collapse_norm_fp8, twin, shape, normed, wide, written)
    yield _case(mhc_merge, mhc_twins.mhc_merge, shape, merged, wide + narrow, wide)

    def all_of_it():
        return *merged(), *mixed()[1:], coefficient, weight

    written += wide
    for op in (_one_by_one, _merge_with_norm):
        yield _case(op, _plain, shape, all_of_it, read + narrow, written, product)


def _one_by_one(y, post, comb, streams, fn, scale, base, coefficient, weight):
    """What follows a layer's output: merge, mix, collapse and norm, each an op of its own."""
    new = mhc_merge(y, post, comb, streams)
    return mhc_mix(new, fn, scale, base, **SETTINGS), mhc_collapse_norm_fp8(
        coefficient, new, weight, EPS
    )


def _merge_with_norm(y, post, comb, streams, fn, scale, base, coefficient, weight):
    """The same with merge, collapse and norm in one op."""
    new, *normed = mhc_merge_norm_fp8(y, post, comb, streams, coefficient, weight, EPS)
    return new, mhc_mix(new, fn, scale, base, **SETTINGS), normed


def _plain(y, post, comb, streams, fn, scale, base, coefficient, weight):
    new = mhc_twins.mhc_merge(y, post, comb, streams)
    normed = mhc_twins.mhc_collapse_norm_fp8(coefficient, new, weight, EPS)
    return new, mhc_twins.mhc_mix(new, fn, scale, base, **SETTINGS), normed


if __name__ == "__main__":
    main(cases)
