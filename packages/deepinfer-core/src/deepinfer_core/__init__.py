"""DeepInfer's engine: runs DeepSeek-V4.1-Flash from its released on-disk format.

from deepinfer_core import LLM, SamplingParams

with LLM("path/to/model") as llm:
    for output in llm.generate(["Hello", "Good evening"], SamplingParams(max_tokens=32)):
        print(output.text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_core.errors import (
    CheckpointError,
    ConfigError,
    DeepInferError,
    DuplicateRequest,
    KernelInputError,
    OutputError,
    RequestError,
    Unsupported,
)
from deepinfer_core.types import (
    ChatOutput,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig
    from deepinfer_core.llm import LLM

__all__ = [
    "LLM",
    "ChatOutput",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "DuplicateRequest",
    "EngineConfig",
    "FinishReason",
    "KernelInputError",
    "OutputError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "Unsupported",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what needs torch or pydantic when it is first used."""
    if name == "LLM":
        from deepinfer_core.llm import LLM

        return LLM
    if name == "EngineConfig":
        from deepinfer_core.config import EngineConfig

        return EngineConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
