"""Router and experts at V4.1-Flash shapes: `python benchmarks/moe.py [--only experts]`.

48 slots of 18.8 MB (weights of 4 bits and their scales) are one rank of eight; every choice is
served here. Bytes count the experts that some row chose, rows in and rows out; FLOPs are held
against the ceiling of block-scaled fp8. The plain form has weights in bfloat16, widened beforehand,
and knows on the host which rows each expert has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from deepinfer_kernels_cuda.moe.combine import combine
from deepinfer_kernels_cuda.moe.experts import experts
from deepinfer_kernels_cuda.moe.fp4_down import run_down
from deepinfer_kernels_cuda.moe.fp4_gate_up import run_gate_up
from deepinfer_kernels_cuda.moe.fp4_tiles import choose_tile_rows
from deepinfer_kernels_cuda.moe.permute import permute
from deepinfer_kernels_cuda.moe.prepare import PreparedExperts, prepare_experts
from deepinfer_kernels_cuda.moe.route import route
from deepinfer_kernels_cuda.moe.shared_expert import shared_expert
from deepinfer_kernels_cuda.quant.activations import round_fp8_wide
from deepinfer_kernels_cuda.quant.matrix import prepare_matrix
from deepinfer_kernels_cuda.reference import moe as twins
from deepinfer_kernels_cuda.testing.bench import Case, main

WIDTH, INNER, EXPERTS, SLOTS, TOP_K, LIMIT = 5120, 2304, 384, 48, 6, 10.0
ROWS = (1, 8, 60, 128, 1024, 8192)
BYTES_A_WEIGHT = 1 / 2 + 1 / 32


def stack(out: int, width: int) -> PreparedExperts:
    """Return random stacked experts, prepared."""
    stored = SimpleNamespace(
        payload=torch.randint(0, 256, (SLOTS, out, width // 2), dtype=torch.uint8, device="cuda"),
        scale=torch.randint(114, 121, (SLOTS, out, width // 32), dtype=torch.uint8, device="cuda"),
        format="fp4_row",
        shape=(out, width),
    )
    return prepare_experts(stored, "cuda")


def tile_matrix(out: int, width: int) -> SimpleNamespace:
    """Return a random fp8 matrix as stored."""
    return SimpleNamespace(
        payload=torch.randn(out, width, device="cuda").to(torch.float8_e4m3fn),
        scale=torch.randint(
            116, 120, (-(-out // 32), -(-width // 32)), dtype=torch.uint8, device="cuda"
        ),
        format="fp8_tile",
        shape=(out, width),
    )


def choices(rows: int) -> tuple[Tensor, Tensor]:
    """Return random ids without repeats in a row, and weights."""
    ids = torch.rand(rows, SLOTS, device="cuda").topk(TOP_K).indices.int()
    return ids, torch.rand(rows, TOP_K, device="cuda")


def plain_experts(
    x: Tensor, ids: Tensor, weights: Tensor, wide: list[Tensor]
) -> Callable[[], Tensor]:
    """Return the experts as bfloat16 products, one expert after the other."""
    groups = [(ids == slot).nonzero(as_tuple=True) for slot in range(SLOTS)]

    def run() -> Tensor:
        parts = torch.empty(*ids.shape, WIDTH, dtype=torch.bfloat16, device="cuda")
        for slot, (row, k) in enumerate(groups):
            rows = x[row]
            gate, up = (rows @ wide[n][slot].T for n in (0, 1))
            inner = torch.nn.functional.silu(gate.float().clamp(max=LIMIT))
            inner = inner * up.float().clamp(-LIMIT, LIMIT) * weights[row, k].unsqueeze(1)
            parts[row, k] = inner.bfloat16() @ wide[2][slot].T
        return parts.float().sum(1)

    return run


def expert_cases() -> Iterator[Case]:
    """Yield the routed experts: whole, and product by product."""
    stacks = stack(INNER, WIDTH), stack(INNER, WIDTH), stack(WIDTH, INNER)
    w1, w3, w2 = stacks
    weights_of = SimpleNamespace(w1=w1, w3=w3, w2=w2)
    wide = [torch.cat([twins.widen(s.slot(n)).bfloat16() for n in range(SLOTS)]) for s in stacks]
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        ids, weights = choices(rows)
        pairs, used = ids.numel(), len(ids.unique())
        matrix = used * WIDTH * INNER * BYTES_A_WEIGHT
        shape = f"{rows} rows x {TOP_K} of {SLOTS}, {used} used"
        long = rows > 1024

        def whole(x: Tensor = x, ids: Tensor = ids, weights: Tensor = weights) -> Tensor:
            return experts(x, ids, weights, weights_of, limit=LIMIT)

        yield Case(
            "experts",
            shape,
            whole,
            3 * matrix + rows * WIDTH * 6,
            pairs * 6 * WIDTH * INNER,
            "fp8_block",
            plain_experts(x, ids, weights, wide),
            captured=not long,
        )
        tile_rows = choose_tile_rows(pairs, SLOTS)
        permutation = permute(ids, SLOTS, tile_rows)
        operand = round_fp8_wide(x)
        inner = run_gate_up(operand, weights, w1, w3, permutation, LIMIT, tile_rows)
        parts = run_down(inner, w2, permutation, tile_rows, TOP_K)

        def up(
            operand=operand, weights=weights, permutation=permutation, tile_rows=tile_rows
        ) -> Tensor:
            return run_gate_up(operand, weights, w1, w3, permutation, LIMIT, tile_rows)

        def down(inner=inner, permutation=permutation, tile_rows=tile_rows) -> Tensor:
            return run_down(inner, w2, permutation, tile_rows, TOP_K)

        yield Case(
            "experts: gate and up",
            shape,
            up,
            2 * matrix + rows * WIDTH * 2 + pairs * INNER * 2,
            pairs * 4 * WIDTH * INNER,
            "fp8_block",
            captured=not long,
        )
        yield Case(
            "experts: down",
            shape,
            down,
            matrix + pairs * (INNER + WIDTH) * 2,
            pairs * 2 * WIDTH * INNER,
            "fp8_block",
            captured=not long,
        )
        yield Case(
            "experts: permute",
            shape,
            lambda ids=ids, tile_rows=tile_rows: permute(ids, SLOTS, tile_rows),
            pairs * 8,
        )
        yield Case(
            "experts: combine",
            shape,
            lambda parts=parts, ids=ids: combine(parts, ids, 48),
            pairs * WIDTH * 2 + rows * WIDTH * 4,
            plain=lambda parts=parts: parts.sum(1, dtype=torch.float32),
        )


def other_cases() -> Iterator[Case]:
    """Yield router and shared expert."""
    gate = prepare_matrix(
        SimpleNamespace(
            payload=torch.randn(EXPERTS, WIDTH, device="cuda").bfloat16() / 70,
            scale=None,
            format="plain",
            shape=(EXPERTS, WIDTH),
        ),
        "cuda",
    )
    bias = 0.01 * torch.randn(EXPERTS, device="cuda")
    shapes = (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    stored = [tile_matrix(*shape) for shape in shapes]
    shared = [prepare_matrix(matrix, "cuda") for matrix in stored]
    wide = [twins.widen(matrix).bfloat16() for matrix in stored]
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()

        def choose(x: Tensor = x) -> tuple[Tensor, Tensor]:
            return route(x, gate, bias, top_k=TOP_K, temperature=1.0, scale=1.5)

        def plain_choice(x: Tensor = x) -> Tensor:
            score = torch.nn.functional.softplus((x @ gate.payload.T).float()).sqrt()
            ids = (score + bias).topk(TOP_K).indices
            chosen = score.gather(1, ids)
            return chosen / chosen.sum(-1, keepdim=True) * 1.5

        yield Case(
            "route",
            f"{rows} rows, {EXPERTS} experts",
            choose,
            EXPERTS * WIDTH * 2 + rows * WIDTH * 2 + rows * TOP_K * 8,
            rows * 2 * EXPERTS * WIDTH,
            plain=plain_choice,
        )

        def plain_shared(x: Tensor = x) -> Tensor:
            gate, up = x @ wide[0].T, x @ wide[1].T
            inner = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
            return inner @ wide[2].T

        for strict in (True, False):
            yield Case(
                f"shared_expert{' strict' * strict}",
                f"{rows} rows",
                lambda x=x, strict=strict: shared_expert(x, *shared, limit=LIMIT, strict=strict),
                3 * WIDTH * INNER * (1 + 1 / 1024) + rows * WIDTH * 4,
                rows * 6 * WIDTH * INNER,
                "fp8_block",
                plain_shared,
                captured=rows <= 1024,
            )


def cases() -> Iterator[Case]:
    """Yield all cases of the family."""
    yield from expert_cases()
    yield from other_cases()


if __name__ == "__main__":
    main(cases)
