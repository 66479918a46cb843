"""Engram at V4.1-Flash sizes: 24 rows of 256 fp8 values a token, 4 streams of 5120."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_kernels_cuda.engram.gate import engram_gate
from deepinfer_kernels_cuda.engram.read import engram_read
from deepinfer_kernels_cuda.engram.rows import engram_rows
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix
from deepinfer_kernels_cuda.reference import engram as twins
from deepinfer_kernels_cuda.testing.bench import Case, main, time_us

SIZE, STREAMS, LAYERS, GRAM, HEADS, WIDTH = 5120, 4, 2, 4, 8, 256
COLUMNS = (GRAM - 1) * HEADS
ROWS = (1, 8, 60, 128, 1024, 8192)
DEVICE_ROWS, HOST_ROWS = 40_000_000, 8_000_000  # 10.6 and 2.1 GB; the released tables: 101 GB
HOST_PROGRAMS = (0, 2, 4, 8, 16)


@dataclass
class StepRows:
    """Stands for `Rows`: one sequence for each of a few rows, or one of all."""

    positions: Tensor
    sequence: Tensor
    slots: Tensor
    row_start: Tensor
    first_position: Tensor


def _cycle(op: Callable[..., object], sets: list[tuple]) -> Callable[[], object]:
    turn = itertools.cycle(sets)
    return lambda: op(*next(turn))


def _table(rows: int, pinned: bool) -> PreparedMatrix:
    device = "cpu" if pinned else "cuda"
    noise = torch.randint(0, 127, (1 << 20, WIDTH), dtype=torch.uint8, device=device)
    payload = torch.empty((rows, WIDTH), dtype=torch.uint8, device=device, pin_memory=pinned)
    for first in range(0, rows, len(noise)):
        payload[first : first + len(noise)] = noise[: rows - first]
    scale = torch.empty((rows, WIDTH // 32), dtype=torch.uint8, device=device, pin_memory=pinned)
    scale[:] = torch.randint(110, 130, (WIDTH // 32,), dtype=torch.uint8, device=device)
    return PreparedMatrix(payload.view(torch.float8_e4m3fn), scale, "fp8_row", (rows, WIDTH))


def _rows(rows: int) -> StepRows:
    count = rows if rows <= 128 else 1
    index = torch.arange(rows, device="cuda")
    sequence = index if count == rows else torch.zeros_like(index)
    positions = 1000 + (index if count == 1 else torch.zeros_like(index))
    bounds = torch.arange(count + 1, device="cuda") * (rows // count)
    first = torch.full((count,), 1000, device="cuda")
    return StepRows(positions, sequence, sequence, bounds, first)


def cases() -> Iterator[Case]:
    """Yield every op of the family at every number of rows."""
    multipliers = torch.randint(1, 1 << 46, (LAYERS, GRAM), device="cuda")
    primes = torch.randint(15_990_000, 16_010_000, (LAYERS, GRAM - 1, HEADS), device="cuda")
    for rows in ROWS:
        step = _rows(rows)
        folded = torch.randint(0, 99092, (rows,), device="cuda")
        history = torch.randint(0, 99092, (rows + 1, 11), device="cuda")
        inputs = (folded, history, step, 3, multipliers, primes)
        yield Case(
            "engram_rows",
            f"{rows} x {LAYERS} layers x {COLUMNS}",
            lambda inputs=inputs: engram_rows(*inputs),
            bytes=rows * 8 * (5 + LAYERS * COLUMNS),
            plain=lambda inputs=inputs: twins.engram_rows(*inputs),
        )
    table = _table(DEVICE_ROWS, pinned=False)
    for rows in ROWS:
        yield _read("engram_read", table, rows, DEVICE_ROWS, 0)
    del table
    table = _table(HOST_ROWS, pinned=True)
    for rows in ROWS:
        yield _read("engram_read (host)", table, rows, HOST_ROWS, 0)
    for programs in HOST_PROGRAMS:
        yield _read("engram_read (host)", table, 1024, HOST_ROWS, programs)
    overlap(table)
    for rows in ROWS:
        yield _gate(rows)


def _read(op: str, table: PreparedMatrix, rows: int, table_rows: int, programs: int) -> Case:
    ids = [(torch.randint(0, table_rows, (rows, COLUMNS), device="cuda"),) for _ in range(20)]
    moved = rows * COLUMNS * (WIDTH + WIDTH // 32)
    host = op.endswith("(host)")
    return Case(
        op,
        f"{rows} x {COLUMNS} x {WIDTH}" + f", {programs} programs" * (programs > 0),
        _cycle(lambda ids: engram_read(table, ids, max_programs=programs), ids),
        bytes=moved if host else moved + rows * COLUMNS * WIDTH * 2,
        plain=None if host else _cycle(lambda ids: twins.engram_read(table, ids), ids),
        note="bytes over the bus" if host else "",
    )


def overlap(table: PreparedMatrix) -> None:
    """Print how much of a read from host memory a product on another stream hides."""
    a, b = (torch.randn(8192, 6400, device="cuda").bfloat16() for _ in range(2))
    side = torch.cuda.Stream()

    def work() -> None:
        torch.mm(a, b.T)

    alone = time_us(work)
    for rows in (60, 128, 1024, 2048):
        ids = torch.randint(0, HOST_ROWS, (rows, COLUMNS), device="cuda")
        for programs in HOST_PROGRAMS:

            def read(ids=ids, programs=programs) -> None:
                engram_read(table, ids, max_programs=programs)

            def both(read=read) -> None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    read()
                work()
                torch.cuda.current_stream().wait_stream(side)

            reading, together = time_us(read), time_us(both)
            hidden = (alone + reading - together) / reading
            who = f"{rows} rows, {programs or 'all'} programs"
            print(
                f"  overlap, {who}: product {alone:.0f} us, read {reading:.0f} us, together "
                f"{together:.0f} us: {hidden:.0%} of the read hidden",
                flush=True,
            )


def _gate(rows: int) -> Case:
    weights = [torch.randn(STREAMS, SIZE, device="cuda").bfloat16() for _ in range(2)]
    is_image = torch.zeros(rows, dtype=torch.bool, device="cuda")
    wide = rows * STREAMS * SIZE * 2

    def make() -> tuple:
        streams = torch.randn(rows, STREAMS, SIZE, device="cuda").bfloat16()
        kv = torch.randn(rows, (STREAMS + 1) * SIZE, device="cuda").bfloat16()
        return streams, kv, *weights, 1e-20, is_image

    sets = [make() for _ in range(max(1, min(20, int(2e8 / (2 * wide)))))]
    return Case(
        "engram_gate",
        f"{rows} x {STREAMS} x {SIZE}",
        _cycle(engram_gate, sets),
        bytes=3 * wide + rows * SIZE * 2,
        plain=_cycle(twins.engram_gate, sets),
    )


if __name__ == "__main__":
    main(cases)
