"""Configurations of the step's kernels that are used."""

from deepinfer_kernels_cuda.step import apply_deltas, carry, correct_inputs, expand_rows
from deepinfer_kernels_cuda.testing.aot import AotCase


def _case(name, kernel, constexprs, num_warps, **types):
    plain = {arg: "*i64" if arg.endswith("_ptr") else "i32" for arg in kernel.arg_names}
    return AotCase(name, kernel, plain | types, constexprs, (), {"num_warps": num_warps})


CASES = [
    _case("expand_rows", expand_rows._expand_rows, {"SEQUENCES": 1024, "ROWS": 512}, 4),
    _case("correct_inputs", correct_inputs._correct_inputs, {"WIDTH": 8}, 1, status_ptr="*i32"),
    _case("apply_deltas", apply_deltas._apply_deltas, {"ITEMS": 256}, 4, table_ptr="*i32"),
    _case("write_carry", carry._write_carry, {"WIDE": 8}, 1),
]
