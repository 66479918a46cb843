"""Engram in the released sizes: 3 orders of 8 heads, rows of 256, 4 streams of 5120."""

from deepinfer_kernels_cuda.engram.gate import _gate
from deepinfer_kernels_cuda.engram.read import VECTOR, _read_rows
from deepinfer_kernels_cuda.engram.rows import ROWS_A_PROGRAM, _hash_rows, _write_history
from deepinfer_kernels_cuda.norm.rms_norm import norm_shape
from deepinfer_kernels_cuda.testing.aot import AotCase

INTEGERS = ("folded", "history", "position", "sequence", "slot", "first", "start", "multiplier")
TYPES = {f"{name}_ptr": "*i64" for name in (*INTEGERS, "prime", "out")} | {
    name: "i32" for name in ("num_rows", "depth", "pad_id", "heads", "num_ids")
}
GATE = {
    "stream_ptr": "*bf16",
    "kv_ptr": "*bf16",
    "query_weight_ptr": "*bf16",
    "key_weight_ptr": "*bf16",
    "image_ptr": "*u8",
    "out_ptr": "*bf16",
    "num_rows": "i32",
    "eps": "fp32",
    "root_size": "fp32",
}


def _case(name, kernel, sizes, types, warps=4) -> AotCase:
    signature = {arg: types[arg] for arg in kernel.arg_names if arg not in sizes}
    return AotCase(name, kernel, signature, sizes, options={"num_warps": warps})


def _gated(images: bool) -> AotCase:
    rows, piece, count = norm_shape(5120)
    sizes = {"SIZE": 5120, "STREAMS": 4, "ROWS": rows, "PIECE": piece, "COUNT": count}
    return _case(f"engram_gate{', images' * images}", _gate, sizes | {"IMAGES": images}, GATE)


HASH = {"GRAM": 4, "COLUMNS": 24, "ROWS": ROWS_A_PROGRAM, "BLOCK": 32}
READ = {"payload_ptr": "*fp8e4nv", "scale_ptr": "*u8", "id_ptr": "*i64", "out_ptr": "*bf16"}
READ |= {"num_ids": "i32"}
SIZES = {"WIDTH": 256, "SCALED": True, "VECTOR": VECTOR, "VECTORS": 256}
CASES = [
    _case("engram_rows", _hash_rows, HASH, TYPES),
    _case("engram_rows history", _write_history, {"ROWS": 128}, TYPES),
    _case("engram_read", _read_rows, SIZES, READ),
    _gated(False),
    _gated(True),
]
