"""`CudaBackend`: the object core loads; it hands each op to its kernel or to its twin.

In `release` numerics ops are kernels. `ideal` and `cache` are there to check things: their ops are
the twins, in plain PyTorch on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deepinfer_kernels_cuda import ops
from deepinfer_kernels_cuda.capabilities import CAPABILITIES, NUMERICS, device_fault
from deepinfer_kernels_cuda.errors import Unsupported
from deepinfer_kernels_cuda.quant.entries import entry_width
from deepinfer_kernels_cuda.reference import ops as twins
from deepinfer_kernels_cuda.runtime import CudaRuntime
from deepinfer_kernels_cuda.values import Matrix
from deepinfer_kernels_cuda.weights import prepare

__all__ = ["CudaBackend"]

# Programs that read host memory; more would take multiprocessors from the work beside them. On an
# H200, beside a product of 1.07 ms, a read of 60 rows takes 32 us and of 1024 rows 0.56 ms, of
# which 86 % is hidden; with 16 programs 0.46 ms and 82 %, with 2 they take 1.3 ms.
HOST_READ_PROGRAMS = 8


class CudaBackend:
    """Every op of V4.1-Flash on one NVIDIA GPU; satisfies core's `KernelBackend`.

    Ops are attributes, with the names and contracts of that Protocol; `ops` and `reference.ops`
    hold the functions.

    Args:
        numerics: `release`, `ideal` or `cache`.
        strict: use, where kernels have two forms, the one whose rows do not depend on other rows.
            Twins have one form, and it is not strict.
        runtime: streams and memory of the device; the current device's by default.
    Raises:
        Unsupported: the mode is unknown, or no GPU is here.
    """

    name = "cuda"
    block_multiple = 2

    def __init__(
        self, numerics: str = "release", strict: bool = True, runtime: CudaRuntime | None = None
    ):
        """Choose each op's function."""
        if numerics not in NUMERICS:
            raise Unsupported(
                f"`numerics` is {numerics!r}; backend `cuda` has {', '.join(NUMERICS)}."
            )
        self.numerics = numerics
        self.runtime = runtime or CudaRuntime()
        release = numerics == "release"
        # Twins use the library's products, which sum a row by the shape of the whole call.
        self.strict = strict and release
        self.activation_dtype = torch.bfloat16 if release else torch.float32
        self._packed = numerics != "ideal"
        self._other: CudaBackend | None = None

        chosen = ops if release else twins
        self.rms_norm = chosen.rms_norm
        self.rotate = chosen.rotate
        self.mhc_mix = chosen.mhc_mix
        self.mhc_collapse = chosen.mhc_collapse
        self.mhc_merge = chosen.mhc_merge
        self.write_window = chosen.write_window
        self.pool_groups = chosen.pool_groups
        self.write_entries = chosen.write_entries
        self.index_select = chosen.index_select
        self.attend = chosen.attend
        self.route = chosen.route
        self.engram_rows = chosen.engram_rows
        self.engram_gate = chosen.engram_gate
        self.sample = chosen.sample
        self.probabilities = chosen.probabilities
        self.logprobs = chosen.logprobs
        self.expand_rows = chosen.expand_rows
        self.correct_inputs = chosen.correct_inputs
        self.linear_float32 = chosen.linear_float32
        # Kernels of products have a form for many rows that is faster and sums in its own order.
        form = {"strict": self.strict} if release else {}
        self.linear = partial(chosen.linear, **form)
        self.grouped_linear = partial(chosen.grouped_linear, **form)
        self.experts = partial(chosen.experts, **form)
        self.shared_expert = partial(chosen.shared_expert, **form)
        self._chosen = chosen

    @staticmethod
    def why_unavailable() -> str | None:
        """Return None when the backend can run here, else one sentence on what is missing."""
        return device_fault()

    def supports(self, capability: str) -> bool:
        """Whether the backend has a numerics mode, `strict`, `graphs` or `autograd`."""
        if capability == "strict":
            return self.numerics == "release"
        if capability == "autograd":
            return self.numerics == "ideal"
        return capability in CAPABILITIES

    def with_strict(self, strict: bool) -> CudaBackend:
        """Return the same backend with strict kernels on or off; it shares the runtime."""
        if strict == self.strict or self.numerics != "release":
            return self
        if self._other is None:  # a step asks for it twice
            self._other = CudaBackend(self.numerics, strict, self.runtime)
            self._other._other = self
        return self._other

    def prepare(self, matrix: Matrix) -> Matrix:
        """Bring a weight to the device, in the layout its ops want."""
        return prepare(matrix, self.runtime.device, kernels=self.numerics == "release")

    def entry_format(self, kind: str, width: int) -> tuple[int, torch.dtype]:
        """Return (last dimension, dtype) of stored entries of `width` channels."""
        return (entry_width(kind, width), torch.uint8) if self._packed else (width, torch.float32)

    def embed(self, token_ids: Tensor, table: Matrix) -> Tensor:
        """Return rows of the embedding table: token_ids [B] int64 -> [B, D]."""
        rows: Tensor = self._chosen.embed(token_ids, table, dtype=self.activation_dtype)
        return rows

    def round_window(self, keys: Tensor) -> Tensor:
        """Return keys [B, d] as they read back from a window ring."""
        return self._chosen.round_entry("window", keys) if self._packed else keys

    def round_index(self, x: Tensor) -> Tensor:
        """Return index queries [B, H, d] rounded to the index format."""
        return self._chosen.round_entry("index", x) if self._packed else x

    def engram_fetch(self, table: Matrix, row_ids: Tensor) -> Callable[[], Tensor]:
        """Begin to gather table rows [B, c] int64; return what hands them over: [B, c * width].

        A table in host memory is read on a stream of its own, by few programs, so that the device
        works on meanwhile.
        """
        if self.numerics != "release":
            return partial(twins.engram_read, table, row_ids, dtype=self.activation_dtype)
        if table.payload.device == row_ids.device:
            return partial(ops.engram_read, table, row_ids)
        return self.runtime.beside(
            partial(ops.engram_read, table, row_ids, max_programs=HOST_READ_PROGRAMS)
        )
