"""The ops of core's `KernelBackend` as functions: kernels. `reference.ops` has their twins.

Fused forms and pieces of them, such as `mhc_collapse_norm`, `prepare_keys` or `permute`, are in
their files.
"""

from deepinfer_kernels_cuda.attention.attend import attend
from deepinfer_kernels_cuda.attention.compressor import pool_groups
from deepinfer_kernels_cuda.attention.entries import write_entries
from deepinfer_kernels_cuda.attention.index_select import index_select
from deepinfer_kernels_cuda.attention.window import write_window
from deepinfer_kernels_cuda.engram.gate import engram_gate
from deepinfer_kernels_cuda.engram.read import engram_read
from deepinfer_kernels_cuda.engram.rows import engram_rows
from deepinfer_kernels_cuda.linear.embed import embed
from deepinfer_kernels_cuda.linear.float32_linear import linear_float32
from deepinfer_kernels_cuda.linear.grouped_linear import grouped_linear
from deepinfer_kernels_cuda.linear.linear import linear
from deepinfer_kernels_cuda.mhc.collapse import mhc_collapse
from deepinfer_kernels_cuda.mhc.merge import mhc_merge
from deepinfer_kernels_cuda.mhc.mix import mhc_mix
from deepinfer_kernels_cuda.moe.experts import experts
from deepinfer_kernels_cuda.moe.route import route
from deepinfer_kernels_cuda.moe.shared_expert import shared_expert
from deepinfer_kernels_cuda.norm.rms_norm import rms_norm
from deepinfer_kernels_cuda.norm.rotate import rotate
from deepinfer_kernels_cuda.quant.entries import round_entry
from deepinfer_kernels_cuda.sampling.logprobs import logprobs
from deepinfer_kernels_cuda.sampling.probabilities import probabilities
from deepinfer_kernels_cuda.sampling.sample import sample
from deepinfer_kernels_cuda.step.correct_inputs import correct_inputs
from deepinfer_kernels_cuda.step.expand_rows import expand_rows

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
