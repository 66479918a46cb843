"""`CpuBackend`: the reference implementation of `KernelBackend`.

Plain torch, on whatever device tensors are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deepinfer_core.cpu.ops import (
    attention,
    compressor,
    engram,
    indexer,
    linear,
    moe,
    sampling,
    step,
)
from deepinfer_core.cpu.ops import streams as residual
from deepinfer_core.cpu.ops.formats import entry_width
from deepinfer_core.cpu.runtime import CpuRuntime
from deepinfer_core.errors import Unsupported
from deepinfer_core.interfaces import (
    BlockStore,
    Carry,
    CompressorState,
    ExpertWeights,
    Matrix,
    Rows,
    SampleInputs,
    SampleOutput,
    Selection,
    WindowStore,
)

__all__ = ["CpuBackend"]

NUMERICS = ("ideal", "cache", "release")
CAPABILITIES = (*NUMERICS, "autograd")


class CpuBackend:
    """Every op in plain torch.

    The contracts are those of `KernelBackend`; ops live in `cpu/ops`, a file a family.

    Args:
        numerics: `ideal`, `cache` or `release`.
        strict: build every product of calls of one fixed shape, so that a row's bits do not depend
            on other rows. Off, the same values come from one large call: faster on many rows, and
            differentiable in `ideal`.
        runtime: queues and memory of the device; the CPU's by default.
    """

    name = "cpu"
    block_multiple = 2

    def __init__(
        self, numerics: str = "release", strict: bool = True, runtime: CpuRuntime | None = None
    ):
        """Check the mode and derive the activation dtype."""
        if numerics not in NUMERICS:
            raise Unsupported(
                f"`numerics` is {numerics!r}; backend `cpu` has {', '.join(NUMERICS)}."
            )
        self.numerics = numerics
        self.strict = strict
        self.runtime = runtime or CpuRuntime()
        self._packed = numerics != "ideal"
        self._release = numerics == "release"
        self.activation_dtype = torch.bfloat16 if self._release else torch.float32

    @staticmethod
    def why_unavailable() -> str | None:
        """A CPU is always there."""
        return None

    def supports(self, capability: str) -> bool:
        """See `KernelBackend.supports`."""
        if capability == "strict":  # a GPU's library sums a row by the shape of the whole call
            return self.runtime.device.type == "cpu"
        return capability in CAPABILITIES

    def with_strict(self, strict: bool) -> CpuBackend:
        """See `KernelBackend.with_strict`."""
        return self if strict == self.strict else CpuBackend(self.numerics, strict, self.runtime)

    def prepare(self, matrix: Matrix) -> Matrix:
        """Bring the weight to the device as stored; ops widen it when they use it."""
        device = self.runtime.device
        if matrix.payload.device == device:
            return matrix
        return linear.Part.of(matrix, lambda stored: stored.to(device))

    def entry_format(self, kind: str, width: int) -> tuple[int, torch.dtype]:
        """See `KernelBackend.entry_format`."""
        return (entry_width(kind, width), torch.uint8) if self._packed else (width, torch.float32)

    # linear

    def embed(self, token_ids: Tensor, table: Matrix) -> Tensor:
        """See `KernelBackend.embed`."""
        return table.payload[token_ids].to(self.activation_dtype)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """See `KernelBackend.linear`."""
        return linear.linear(x, weight, self.strict, self._release)

    def linear_float32(self, x: Tensor, weight: Matrix) -> Tensor:
        """See `KernelBackend.linear_float32`."""
        return linear.linear_float32(x, weight, self.strict)

    def grouped_linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """See `KernelBackend.grouped_linear`."""
        return linear.grouped_linear(x, weight, self.strict)

    # norms and residual streams

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """See `KernelBackend.rms_norm`."""
        return residual.rms_norm(x, weight, eps)

    def mhc_mix(
        self,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `KernelBackend.mhc_mix`."""
        return residual.mhc_mix(
            streams,
            fn,
            scale,
            base,
            norm_eps=norm_eps,
            eps=eps,
            iterations=iterations,
            strict=self.strict,
        )

    def mhc_collapse(self, coefficient: Tensor, streams: Tensor) -> Tensor:
        """See `KernelBackend.mhc_collapse`."""
        return residual.mhc_collapse(coefficient, streams)

    def mhc_merge(self, y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
        """See `KernelBackend.mhc_merge`."""
        return residual.mhc_merge(y, post, comb, streams)

    # attention

    def rotate(
        self, x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False
    ) -> Tensor:
        """See `KernelBackend.rotate`."""
        return residual.rotate(x, positions, inv_freq, inverse)

    def round_window(self, keys: Tensor) -> Tensor:
        """See `KernelBackend.round_window`."""
        return attention.round_entry("window", keys) if self._packed else keys

    def write_window(self, store: WindowStore, keys: Tensor, rows: Rows) -> None:
        """See `KernelBackend.write_window`."""
        attention.write_window(store, keys, rows, self._packed)

    def pool_groups(
        self, values: Tensor, gates: Tensor, state: CompressorState, rows: Rows
    ) -> Tensor:
        """See `KernelBackend.pool_groups`."""
        return compressor.pool_groups(values, gates, state, rows)

    def write_entries(self, store: BlockStore, entries: Tensor, rows: Rows, kind: str) -> None:
        """See `KernelBackend.write_entries`."""
        compressor.write_entries(store, entries, rows, kind, self._packed)

    def round_index(self, x: Tensor) -> Tensor:
        """See `KernelBackend.round_index`."""
        return attention.round_entry("index", x) if self._packed else x

    def index_select(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: BlockStore,
        rows: Rows,
        *,
        top_k: int,
        candidates: Tensor | None,
        candidate_block: int,
        publish: int,
    ) -> Selection:
        """See `KernelBackend.index_select`."""
        return indexer.index_select(
            queries,
            weights,
            keys,
            rows,
            top_k=top_k,
            candidates=candidates,
            candidate_block=candidate_block,
            publish=publish,
            strict=self.strict,
            packed=self._packed,
            release=self._release,
        )

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        window: WindowStore,
        rows: Rows,
        sink: Tensor,
        *,
        scale: float,
        entries: BlockStore | None = None,
        picks: Tensor | None = None,
    ) -> Tensor:
        """See `KernelBackend.attend`."""
        return attention.attend(
            queries,
            keys,
            window,
            rows,
            sink,
            scale=scale,
            entries=entries,
            picks=picks,
            strict=self.strict,
            packed=self._packed,
            release=self._release,
        )

    # experts

    def route(
        self, x: Tensor, gate: Matrix, bias: Tensor, *, top_k: int, temperature: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `KernelBackend.route`."""
        return moe.route(
            x, gate, bias, top_k=top_k, temperature=temperature, scale=scale, strict=self.strict
        )

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, *, limit: float
    ) -> Tensor:
        """See `KernelBackend.experts`."""
        return moe.experts(
            x, ids, weights, experts, limit=limit, strict=self.strict, release=self._release
        )

    def shared_expert(
        self, x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float
    ) -> Tensor:
        """See `KernelBackend.shared_expert`."""
        return moe.shared_expert(
            x, w1, w3, w2, limit=limit, strict=self.strict, release=self._release
        )

    # Engram

    def engram_rows(
        self,
        folded: Tensor,
        history: Tensor,
        rows: Rows,
        pad_id: int,
        multipliers: Tensor,
        primes: Tensor,
    ) -> Tensor:
        """See `KernelBackend.engram_rows`."""
        return engram.engram_rows(folded, history, rows, pad_id, multipliers, primes)

    def engram_fetch(self, table: Matrix, row_ids: Tensor) -> Callable[[], Tensor]:
        """See `KernelBackend.engram_fetch`."""
        return partial(engram.engram_read, table, row_ids, self.activation_dtype)

    def engram_gate(
        self,
        streams: Tensor,
        kv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        eps: float,
        is_image: Tensor | None,
    ) -> Tensor:
        """See `KernelBackend.engram_gate`."""
        return engram.engram_gate(streams, kv, query_weight, key_weight, eps, is_image)

    # sampling and step plumbing

    def sample(self, logits: Tensor, inputs: SampleInputs) -> SampleOutput:
        """See `KernelBackend.sample`."""
        return sampling.sample(logits, inputs)

    def probabilities(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        """See `KernelBackend.probabilities`."""
        return sampling.probabilities(logits, inputs)

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `KernelBackend.logprobs`."""
        return sampling.logprobs(logits, token_ids, num_top)

    def expand_rows(self, num_rows: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """See `KernelBackend.expand_rows`."""
        return step.expand_rows(num_rows, start, total)

    def correct_inputs(
        self, tokens: Tensor, start: Tensor, tag: Tensor, remap: Tensor, carry: Carry | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `KernelBackend.correct_inputs`."""
        return step.correct_inputs(tokens, start, tag, remap, carry)
