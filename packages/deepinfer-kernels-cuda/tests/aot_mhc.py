"""Hyper-connections in the released sizes: 4 streams of 5120."""

from deepinfer_kernels_cuda.mhc import mix
from deepinfer_kernels_cuda.mhc.collapse import _collapse, _collapse_norm
from deepinfer_kernels_cuda.mhc.merge import _merge
from deepinfer_kernels_cuda.mhc.merge_norm import _merge_norm
from deepinfer_kernels_cuda.norm.rms_norm import norm_shape
from deepinfer_kernels_cuda.testing.aot import AotCase

SIZE, STREAMS, OUT, COLUMNS = 5120, 4, 24, 32
STREAM = {"SIZE": SIZE, "STREAMS": STREAMS}
FLOATS = ("scale_ptr", "base_ptr", "pre_ptr", "post_ptr", "comb_ptr", "partial_ptr", "fn_ptr")
TYPES = {name: "*fp32" for name in (*FLOATS, "coefficient_ptr")} | {
    "stream_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "y_ptr": "*bf16",
    "out_ptr": "*bf16",
    "new_ptr": "*bf16",
    "payload_ptr": "*fp8e4nv",
    "num_rows": "i32",
    "iterations": "i32",
    "norm_eps": "fp32",
    "eps": "fp32",
}


def _case(name, kernel, sizes, warps=4, **types) -> AotCase:
    signature = {arg: {**TYPES, **types}[arg] for arg in kernel.arg_names if arg not in sizes}
    return AotCase(name, kernel, signature, sizes, options={"num_warps": warps})


MIX = {"K": STREAMS * SIZE, "OUT": OUT, "COLUMNS": COLUMNS}


def _products(many: bool) -> AotCase:
    sizes = MIX | {"BLOCK_ROWS": mix.BLOCK_ROWS, "CHUNK": mix.CHUNK, "TILE": mix.TILE}
    tuned = {"CHUNKS": mix.GROUP, "STAGES": 3, "UNROLL": 1}
    sizes |= tuned if many else {"CHUNKS": 1, "STAGES": 1, "UNROLL": mix.CHUNK}
    types = {"fn_ptr": "*bf16" if many else "*fp32"}
    name = f"mhc_mix products, {'many' if many else 'few'}"
    return _case(name, mix._products, sizes | {"SPLIT": many}, **types)


def _coefficients(many: bool) -> AotCase:
    chunks = STREAMS * SIZE // (mix.TILE * mix.CHUNK)
    groups = chunks // mix.GROUP
    sizes = MIX | {"STREAMS": STREAMS, "ROWS": mix.ROWS_A_PROGRAM, "GROUPS": groups, "BLOCK": 4}
    sizes |= {"PARTS": groups, "RUN": 1} if many else {"PARTS": chunks, "RUN": mix.GROUP}
    return _case(f"mhc_mix coefficients, {'many' if many else 'few'}", mix._coefficients, sizes)


def _norm(name: str, kernel, fp8: bool) -> AotCase:
    rows, piece, count = norm_shape(SIZE)
    sizes = STREAM | {"ROWS": rows, "PIECE": piece, "COUNT": count, "WEIGHTED": True, "FP8": fp8}
    return _case(f"{name}{'_fp8' * fp8}", kernel, sizes, scale_ptr="*u8")


SPLIT = {"OUT": OUT, "K": STREAMS * SIZE, "BLOCK": 1024}
CASES = [
    _case("mhc_mix split", mix._split, SPLIT, split_ptr="*bf16"),
    *(_products(many) for many in (False, True)),
    *(_coefficients(many) for many in (False, True)),
    _case("mhc_collapse", _collapse, STREAM | {"BLOCK": 1024}),
    _case("mhc_merge", _merge, STREAM | {"BLOCK": 1024}),
    *(_norm("mhc_collapse_norm", _collapse_norm, fp8) for fp8 in (False, True)),
    *(_norm("mhc_merge_norm", _merge_norm, fp8) for fp8 in (False, True)),
]
