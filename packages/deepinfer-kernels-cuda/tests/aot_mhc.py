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


def _case(name, kernel, sizes, warps=4, registers=None, **types) -> AotCase:
    signature = {arg: {**TYPES, **types}[arg] for arg in kernel.arg_names if arg not in sizes}
    options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    return AotCase(name, kernel, signature, sizes, options=options)


MIX = {"K": STREAMS * SIZE, "OUT": OUT, "COLUMNS": COLUMNS}


FORMS = {"few": 1, "group": mix.GROUP, "part": mix.GROUP * mix.PART}  # chunks of a program


def _products(form: str) -> AotCase:
    many = form != "few"
    sizes = MIX | {"BLOCK_ROWS": mix.BLOCK_ROWS, "CHUNK": mix.CHUNK, "TILE": mix.TILE}
    sizes |= {"STAGES": 3, "UNROLL": 1} if many else {"STAGES": 1, "UNROLL": mix.CHUNK}
    sizes |= {"CHUNKS": FORMS[form], "GROUP": mix.GROUP, "SPLIT": many}
    types = {"fn_ptr": "*bf16" if many else "*fp32"}
    registers = 128 if many else None
    return _case(f"mhc_mix products, {form}", mix._products, sizes, registers=registers, **types)


def _coefficients(form: str) -> AotCase:
    whole = STREAMS * SIZE // (mix.TILE * mix.CHUNK * FORMS["part"])
    rows = mix.ROWS_OF_FEW if form == "few" else mix.ROWS_OF_MANY
    sizes = MIX | {"STREAMS": STREAMS, "ROWS": rows, "WHOLE": whole, "BLOCK": 4}
    sizes |= {"CHUNKS_A_GROUP": mix.GROUP if form == "few" else 1}
    sizes |= {"GROUPS_A_PART": 1 if form == "part" else mix.PART}
    sizes |= {"PARTS": whole * FORMS["part"] // FORMS[form]}
    return _case(f"mhc_mix coefficients, {form}", mix._coefficients, sizes, warps=1)


def _norm(name: str, kernel, fp8: bool) -> AotCase:
    rows, piece, count = norm_shape(SIZE)
    sizes = STREAM | {"ROWS": rows, "PIECE": piece, "COUNT": count, "WEIGHTED": True, "FP8": fp8}
    return _case(f"{name}{'_fp8' * fp8}", kernel, sizes, scale_ptr="*u8")


SPLIT = {"OUT": OUT, "K": STREAMS * SIZE, "BLOCK": 1024}
CASES = [
    _case("mhc_mix split", mix._split, SPLIT, split_ptr="*bf16"),
    *(_products(form) for form in FORMS),
    *(_coefficients(form) for form in FORMS),
    _case("mhc_collapse", _collapse, STREAM | {"BLOCK": 1024}),
    _case("mhc_merge", _merge, STREAM | {"BLOCK": 1024}),
    *(_norm("mhc_collapse_norm", _collapse_norm, fp8) for fp8 in (False, True)),
    *(_norm("mhc_merge_norm", _merge_norm, fp8) for fp8 in (False, True)),
]
