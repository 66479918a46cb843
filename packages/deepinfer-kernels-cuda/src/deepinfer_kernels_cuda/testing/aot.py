"""Compiling kernels ahead of time, for devices that are not there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["MAX_SHARED_BYTES", "TARGETS", "AotCase", "compile_case"]

TARGETS = (90, 100)  # compute capabilities of Hopper and Blackwell
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class AotCase:
    """One kernel in one configuration.

    Attributes:
        name: of the case.
        kernel: the `triton.jit` function.
        signature: argument -> type, such as `*bf16`, `*fp8e4nv`, `*u8`, `i32`, `fp32`.
        constexprs: argument -> compile-time value.
        by_capability: capability -> constexprs that differ from `constexprs` there.
        divisible_by_16: arguments known to be multiples of 16, as the launcher would find; pointers
            always are.
        options: `num_warps`, `num_stages`, `maxnreg`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    by_capability: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    divisible_by_16: tuple[str, ...] = ()
    options: Mapping[str, int] = field(default_factory=dict)


def compile_case(case: AotCase, capability: int) -> int:
    """Compile a case to machine code; return the bytes of shared memory it needs.

    Raises:
        RuntimeError: the code never returns: it is the bare trap that the compiler leaves, without
            a word, of a kernel that it cannot lower for this capability.
    """
    constexprs = {**case.constexprs, **case.by_capability.get(capability, {})}
    names = case.kernel.arg_names
    signature = {
        name: "constexpr" if name in constexprs else case.signature[name] for name in names
    }
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if name in case.divisible_by_16 or signature[name].startswith("*")
    }
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs=attrs,
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(case.options)
    )
    assembly = compiled.asm["ptx"]
    if re.search(r"\btrap;", assembly) and not re.search(r"\bret;", assembly):
        raise RuntimeError("the machine code is a bare trap")
    return int(compiled.metadata.shared)
