"""The twins of `deepinfer_kernels_cuda.ops`, under the same names."""

from deepinfer_kernels_cuda.reference.attention import attend, write_entries, write_window
from deepinfer_kernels_cuda.reference.compressor import pool_groups
from deepinfer_kernels_cuda.reference.engram import engram_gate, engram_read, engram_rows
from deepinfer_kernels_cuda.reference.entries import round_entry
from deepinfer_kernels_cuda.reference.indexer import index_select
from deepinfer_kernels_cuda.reference.linear import embed, grouped_linear, linear, linear_float32
from deepinfer_kernels_cuda.reference.mhc import mhc_collapse, mhc_merge, mhc_mix
from deepinfer_kernels_cuda.reference.moe import experts, route, shared_expert
from deepinfer_kernels_cuda.reference.norm import rms_norm, rotate
from deepinfer_kernels_cuda.reference.sampling import logprobs, probabilities, sample
from deepinfer_kernels_cuda.reference.step import correct_inputs, expand_rows

__all__ = [
    "attend",
    "correct_inputs",
    "embed",
    "engram_gate",
    "engram_read",
    "engram_rows",
    "expand_rows",
    "experts",
    "grouped_linear",
    "index_select",
    "linear",
    "linear_float32",
    "logprobs",
    "mhc_collapse",
    "mhc_merge",
    "mhc_mix",
    "pool_groups",
    "probabilities",
    "rms_norm",
    "rotate",
    "round_entry",
    "route",
    "sample",
    "shared_expert",
    "write_entries",
    "write_window",
]
