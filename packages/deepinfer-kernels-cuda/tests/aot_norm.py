"""Norms and rotary embedding in the released sizes."""

from deepinfer_kernels_cuda.norm.rms_norm import _rms_norm, norm_shape
from deepinfer_kernels_cuda.norm.rotate import _rotate
from deepinfer_kernels_cuda.testing.aot import AotCase

NORM = {
    "x_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "out_ptr": "*bf16",
    "payload_ptr": "*fp8e4nv",
    "scale_ptr": "*u8",
    "num_rows": "i32",
    "eps": "fp32",
}
ROTATE = {
    "x_ptr": "*bf16",
    "position_ptr": "*i64",
    "frequency_ptr": "*fp32",
    "out_ptr": "*bf16",
    "num_rows": "i32",
    "heads": "i32",
}


def _norm(size: int, fp8: bool) -> AotCase:
    rows, piece, count = norm_shape(size)
    sizes = {"SIZE": size, "ROWS": rows, "PIECE": piece, "COUNT": count}
    sizes |= {"WEIGHTED": True, "FP8": fp8}
    name = f"rms_norm{'_fp8' * fp8} {size}"
    return AotCase(name, _rms_norm, NORM, sizes, options={"num_warps": 4})


def _rotated(size: int, inverse: bool) -> AotCase:
    sizes = {
        "SIZE": size,
        "PAIRS": 32,
        "INVERSE": inverse,
        "ROWS": 8192 // size,
        "BLOCK": 512 if size > 128 else 64,
        "BLOCK_PAIRS": 32,
    }
    return AotCase(f"rotate {size}", _rotate, ROTATE, sizes, options={"num_warps": 4})


CASES = [_norm(size, fp8) for size in (5120, 1280, 512) for fp8 in (False, True)]
CASES += [_norm(128, False), _rotated(512, False), _rotated(512, True), _rotated(128, False)]
