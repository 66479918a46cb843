"""Kernels of activation rounding and linear layers, in the configurations of V4.1-Flash."""

import torch

from deepinfer_kernels_cuda.linear import blocks, embed, many_rows, rows
from deepinfer_kernels_cuda.linear import chunks as cuts
from deepinfer_kernels_cuda.quant import activations
from deepinfer_kernels_cuda.testing.aot import AotCase


def _integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


def _blocks(num_rows: int, chunks: int, whole: bool, even: bool = True) -> AotCase:
    tile = blocks.block_tile(num_rows, cuts.Cut(5, chunks))
    return AotCase(
        name=f"block_product[{num_rows}, chunks={chunks}, whole={whole}, even={even}]",
        kernel=blocks._block_product,
        signature={
            "payload_ptr": "*u16",
            "scale_ptr": "*i32",
            "x_ptr": "*bf16",
            "out_ptr": "*bf16" if whole else "*fp32",
            **_integers("rows row_stride outputs group_outputs columns words chunk"),
        },
        constexprs={
            "CHUNKS": chunks,
            "WHOLE": whole,
            "EVEN": even,
            "BM": tile.outputs,
            "BN": tile.rows,
            "SETTLE": False,
            "STAGES": tile.stages,
        },
        by_capability={90: {"SETTLE": True}},
        divisible_by_16=("row_stride", "outputs", "group_outputs", "columns"),
        options={"num_warps": tile.warps},
    )


def _rows(num_rows: int, chunks: int, whole: bool, out: str, wide: bool = False) -> AotCase:
    tile = rows.row_tile(num_rows, wide)
    return AotCase(
        name=f"row_product[{num_rows}, chunks={chunks}, whole={whole}, {out}, wide={wide}]",
        kernel=rows._row_product,
        signature={
            "w_ptr": "*fp32" if wide else "*bf16",
            "x_ptr": "*bf16",
            "out_ptr": out,
            **_integers("rows outputs columns chunk"),
        },
        constexprs={
            "CHUNKS": chunks,
            "WHOLE": whole,
            "EVEN": True,
            "WIDE": wide,
            "BM": tile.outputs,
            "BN": tile.rows,
            "BK": tile.columns,
            "STAGES": tile.stages,
        },
        divisible_by_16=("outputs", "columns"),
        options={"num_warps": tile.warps},
    )


def _many_rows(chunks: int, out: str, num_rows: int = 8192) -> AotCase:
    dtype = torch.bfloat16 if out == "bf16" else torch.float32
    tile = many_rows._many_rows_tile(num_rows, 512, chunks, dtype, 132)
    return AotCase(
        name=f"many_rows[{num_rows}, chunks={chunks}, {out}]",
        kernel=many_rows._many_rows if chunks == 1 else many_rows._many_rows_in_chunks,
        signature={
            "x_desc": f"tensordesc<bf16[{tile.height},64]>",
            "w_desc": f"tensordesc<bf16[{tile.width},64]>",
            "out_desc": f"tensordesc<{out}[{tile.height},{tile.width}]>",
            "out_ptr": f"*{out}",
            **_integers("rows outputs columns chunk"),
        },
        constexprs={"BM": tile.height, "BN": tile.width, "BK": 64, "GROUP": 8, "PROGRAMS": 132}
        | ({"ONE_LOOP": False} if chunks > 1 else {}),
        by_capability={90: {"ONE_LOOP": True}} if chunks > 1 else {},
        divisible_by_16=("outputs", "columns"),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


def _round(wide: bool) -> AotCase:
    return AotCase(
        name=f"round_fp8[wide={wide}]",
        kernel=activations._round_fp8,
        signature={
            "x_ptr": "*bf16",
            "payload_ptr": "*bf16" if wide else "*fp8e4nv",
            "scale_ptr": "*bf16" if wide else "*u8",
            **_integers("num_groups groups_a_row width"),
        },
        constexprs={"WIDE": wide, "EVEN": True, "GROUPS": activations.GROUPS_A_PROGRAM},
        divisible_by_16=("num_groups", "groups_a_row", "width"),
        options={"num_warps": 4},
    )


CASES = [
    _blocks(8, 1, True),
    _blocks(8, 8, False),
    _blocks(60, 1, True),
    _blocks(60, 8, False),
    _blocks(60, 1, True, even=False),
    _blocks(128, 8, False),
    _blocks(512, 8, True),
    _blocks(512, 1, True),
    _rows(8, 14, False, "*fp32"),
    _rows(60, 1, True, "*fp32"),
    _rows(1024, 8, True, "*bf16"),
    _rows(8, 1, True, "*fp32", wide=True),
    _many_rows(1, "bf16"),
    _many_rows(8, "bf16"),
    _many_rows(8, "fp32"),
    _many_rows(8, "bf16", 1024),
    _many_rows(8, "fp32", 1024),
    _many_rows(1, "fp32", 1024),
    _round(False),
    _round(True),
    AotCase(
        name="expand_blocks",
        kernel=blocks._expand_blocks,
        signature={
            "payload_ptr": "*u16",
            "scale_ptr": "*i32",
            "out_ptr": "*bf16",
            **_integers("outputs columns"),
        },
        constexprs={"BM": 64},
        divisible_by_16=("outputs", "columns"),
        options={"num_warps": 4},
    ),
    AotCase(
        name="add_up",
        kernel=cuts._add_up,
        signature={"chunks_ptr": "*fp32", "out_ptr": "*bf16", "size": "i32"},
        constexprs={"CHUNKS": 8, "BLOCK": 512},
        options={"num_warps": 4},
    ),
    AotCase(
        name="embed",
        kernel=embed._embed,
        signature={
            "ids_ptr": "*i64",
            "table_ptr": "*bf16",
            "out_ptr": "*bf16",
            **_integers("size width"),
        },
        constexprs={"BLOCK": 1024},
        divisible_by_16=("size", "width"),
        options={"num_warps": 4},
    ),
]
