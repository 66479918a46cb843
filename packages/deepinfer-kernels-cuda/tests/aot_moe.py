"""Router, grouping and experts in the configurations that V4.1-Flash uses."""

import torch

from deepinfer_kernels_cuda.moe import fp4_tiles, permute
from deepinfer_kernels_cuda.moe.combine import COLUMNS, _combine
from deepinfer_kernels_cuda.moe.fp4_down import _down
from deepinfer_kernels_cuda.moe.fp4_gate_up import _gate_up
from deepinfer_kernels_cuda.moe.plain_experts import BK, BM, _plain_down, _plain_gate_up
from deepinfer_kernels_cuda.moe.route import _choose
from deepinfer_kernels_cuda.moe.shared_expert import GROUPS_A_PROGRAM, _activate_rows
from deepinfer_kernels_cuda.testing.aot import AotCase

POINTERS = {
    "x_ptr": "*bf16",
    "w1_ptr": "*i16",
    "s1_ptr": "*i32",
    "w3_ptr": "*i16",
    "s3_ptr": "*i32",
    "w2_ptr": "*i16",
    "s2_ptr": "*i32",
    "order_ptr": "*i32",
    "tile_ptr": "*i32",
    "weights_ptr": "*fp32",
    "out_ptr": "*bf16",
    "ids_ptr": "*i32",
    "counts_ptr": "*i32",
    "logits_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "parts_ptr": "*bf16",
    "gate_ptr": "*bf16",
    "up_ptr": "*bf16",
    "limit": "fp32",
    "temperature": "fp32",
    "scale": "fp32",
}
SIZES = (
    *("width", "inner", "panel_rows", "num_blocks", "num_tiles", "num_pairs", "num_slots"),
    *("num_experts", "bias_stride", "num_groups", "groups_a_row"),
)
SIGNATURE = POINTERS | dict.fromkeys(SIZES, "i32")
EVEN_SIZES = ("width", "inner", "panel_rows")


def _case(name, kernel, constexprs, warps, stages=1, hopper=None, **types):
    options = {"num_warps": warps, "num_stages": stages}
    return AotCase(
        name,
        kernel,
        SIGNATURE | types,
        constexprs,
        EVEN_SIZES,
        options,
        by_capability={90: hopper or {}},
    )


def _products(tile_rows: int, wide: bool = False, even: bool = True) -> list[AotCase]:
    options = fp4_tiles.tile_options(tile_rows, torch.device("cpu"))
    common = {"EVEN": even, "WIDE": wide, **options}
    name = f"{tile_rows}{' wide' * wide}{' ragged' * (not even)}"
    sizes = fp4_tiles.WARPS, fp4_tiles.STAGES, {"SETTLE": True}
    return [
        _case(f"gate_up {name}", _gate_up, {**common, "TOP_K": 6}, *sizes),
        _case(f"down {name}", _down, common, *sizes),
    ]


PLAIN = {"w1_ptr": "*bf16", "w3_ptr": "*bf16", "w2_ptr": "*bf16"}
PLAIN_SIZES = {"BM": BM, "BN": 8, "BK": BK}
CASES = [
    *(case for rows in (8, 16, 32, 64, 128) for case in _products(rows)),
    *_products(16, wide=True, even=False),
    _case(
        "plain_gate_up", _plain_gate_up, {**PLAIN_SIZES, "TOP_K": 6, "ROUND": True}, 4, 3, **PLAIN
    ),
    _case("plain_down", _plain_down, PLAIN_SIZES, 4, 3, **PLAIN),
    _case("permute_few", permute._permute_few, {"TILE_ROWS": 16, "PAIRS": permute.FEW}, 4),
    _case("permute", permute._permute, {"TILE_ROWS": 128, "CHUNK": 4096}, 16),
    _case("choose", _choose, {"TOP_K": 6, "EXPERTS": 512, "CHOICES": 8}, 4),
    _case("combine", _combine, {"TOP_K": 6, "COLUMNS": COLUMNS}, 4, out_ptr="*fp32"),
    _case("activate_rows", _activate_rows, {"ROUND": True, "GROUPS": GROUPS_A_PROGRAM}, 4),
]
