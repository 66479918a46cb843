"""Configurations of the sampling kernels that are used, at V = 129280."""

from deepinfer_kernels_cuda.sampling import (
    choose,
    draw,
    head,
    logprobs,
    probabilities,
    scan,
    whole,
)
from deepinfer_kernels_cuda.testing.aot import AotCase

_TILE, _TILES = 4096, 32
_TYPES = {
    "mask_ptr": "*i32",
    "seen_ptr": "*i1",
    "counts_ptr": "*i32",
    "seeds_ptr": "*i64",
    "positions_ptr": "*i64",
    "cycle_ptr": "*i64",
    "top_k_ptr": "*i64",
    "value_id_ptr": "*i32",
    "drawn_id_ptr": "*i32",
    "token_ptr": "*i64",
    "count_ptr": "*i32",
    "head_ids_ptr": "*i32",
    "held_ids_ptr": "*i32",
    "open_ptr": "*i32",
    "groups_ptr": "*i32",
    "num_groups_ptr": "*i32",
    "total_ptr": "*fp64",
    "kept_mass_ptr": "*fp64",
    "ids_ptr": "*i64",
    "mass_ptr": "*fp64",
    "limit_ptr": "*i64",
    "status_ptr": "*i32",
}


def _case(name, kernel, constexprs, num_warps):
    arguments = [arg for arg in kernel.arg_names if arg not in constexprs]
    types = {arg: _TYPES.get(arg, "*fp32" if arg.endswith("_ptr") else "i32") for arg in arguments}
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return AotCase(name, kernel, types, constexprs, ("vocab_size",), options)


def _scan(name, *on):
    names = scan._scan.arg_names
    flags = {flag: flag in on for flag in names[names.index("HAS_MASK") :]}
    return _case(name, scan._scan, {"TILE": _TILE, **flags}, 8)


_CUTS = {"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True}
_TOP_P = {"HAS_TOP_K": False, "HAS_TOP_P": True, "HAS_MIN_P": False}
_EVERYTHING = ("HAS_MASK", "HAS_BIAS", "HAS_PENALTIES", *_CUTS, "GROUP", "MASS")
_SIZES = {"TILE": _TILE, "TILES": _TILES}
_COLLECT = {"ROOM": _TILE, "MEMBERS": 64, "LISTED": 32, "READERS": 16}
_WHOLE = {"TILE": _TILE, **_CUTS, "HAS_CYCLE": True}
_ENDS = {**_SIZES, "PARTS": 8, "SMALL": 1024}

CASES = [
    _scan("scan"),
    _scan("scan_all", *_EVERYTHING),
    _case("draw", draw._draw, {**_SIZES, **_CUTS, "SEVERAL": 4, "HAS_CYCLE": True}, 4),
    _case("cut", head._cut, {"TILES": _TILES, **_CUTS}, 8),
    _case("collect", head._collect, _COLLECT, 4),
    _case("choose", choose._choose, {**_ENDS, **_CUTS, "HAS_CYCLE": True, "DRAW": True}, 8),
    _case("border", choose._choose, {**_ENDS, **_TOP_P, "HAS_CYCLE": False, "DRAW": False}, 8),
    _case("whole", whole._end_whole, {**_WHOLE, "DRAW": True}, 16),
    _case("spread", probabilities._spread, {**_SIZES, "HAS_MIN_P": True}, 8),
    _case("score", logprobs._score, {**_SIZES, "SMALL": 256, "PICK": True}, 8),
]
