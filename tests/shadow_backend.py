"""A kernel backend that repeats every op on the CPU with the reference's ops, and compares.

Both get the same inputs, those of the run with kernels, so what is found is an op's own error and
no drift of earlier ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.ops.linear import Part

# Ops that write a store, and which argument it is.
WRITERS = {"write_window": 0, "write_entries": 0, "pool_groups": 2, "engram_rows": 1}
OPS = (
    *("embed", "linear", "linear_float32", "grouped_linear", "rms_norm", "mhc_mix"),
    *("mhc_collapse", "mhc_merge", "rotate", "round_window", "round_index", "index_select"),
    *("attend", "route", "experts", "shared_expert", "engram_gate", "expand_rows"),
    *WRITERS,
)


class ShadowBackend:
    """Runs ops of `backend`, whose results count, and those of the reference beside them.

    Attributes:
        worst: op -> largest error of any call, as a share of the largest value of that output.
        beyond: op -> share of elements that are off by more than a unit of the last place of
            bfloat16, the largest of any call.
        integers: op -> rows that differ in a result of integers.
    """

    def __init__(self, backend: Any):
        self._backend = backend
        self._reference = CpuBackend(backend.numerics, strict=False)
        self._stored: dict[int, tuple[Any, Part]] = {}
        self.worst: dict[str, float] = defaultdict(float)
        self.beyond: dict[str, float] = defaultdict(float)
        self.integers: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return self._both(name, found) if name in OPS else found

    def prepare(self, matrix: Any) -> Any:
        prepared = self._backend.prepare(matrix)
        self._stored[id(prepared)] = (prepared, Part.of(matrix, lambda stored: stored.cpu()))
        return prepared

    def _both(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            mine = [self._moved(each) for each in args]
            options = {key: self._moved(each) for key, each in kwargs.items()}
            expected = getattr(self._reference, name)(*mine, **options)
            result = op(*args, **kwargs)
            self.calls[name] += 1
            self._compare(name, result, expected)
            if name in WRITERS:
                place = WRITERS[name]
                self._compare(f"{name}: store", args[place], mine[place])
            return result

        return run

    def _moved(self, value: Any) -> Any:
        """Return a value with copies of its tensors on the CPU; weights as they were stored."""
        if id(value) in self._stored:
            return self._stored[id(value)][1]
        if isinstance(value, Tensor):
            return value.detach().cpu().clone()
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{f.name: self._moved(getattr(value, f.name)) for f in fields(value)}
            )
        return value

    def _compare(self, name: str, result: Any, expected: Any) -> None:
        if isinstance(result, Tensor):
            self._tensors(name, result.detach().cpu(), expected)
        elif isinstance(result, tuple):
            for part, (a, b) in enumerate(zip(result, expected, strict=True)):
                self._compare(f"{name}[{part}]", a, b)
        elif hasattr(result, "picks"):
            self._compare(f"{name}: picks", result.picks, expected.picks)
            if result.candidates is not None:
                self._compare(f"{name}: candidates", result.candidates, expected.candidates)
        elif hasattr(result, "data"):
            self._compare(name, result.data, expected.data)

    def _tensors(self, name: str, result: Tensor, expected: Tensor) -> None:
        assert result.shape == expected.shape, name
        if not result.is_floating_point():
            if result.numel():
                rows = (result != expected).reshape(len(result), -1).any(1)
                self.integers[name] += int(rows.sum())
            return
        a, b = result.double(), expected.double()
        assert a.isfinite().equal(b.isfinite()), f"{name}: one of both is not finite"
        error = (a - b).abs()
        if error.numel():
            self.worst[name] = max(
                self.worst[name], float(error.max() / b.abs().max().clamp(1e-30))
            )
            unit = torch.exp2(b.abs().clamp(min=1e-30).log2().floor() - 7)
            share = float((error > 1.01 * unit).double().mean())
            self.beyond[name] = max(self.beyond[name], share)
