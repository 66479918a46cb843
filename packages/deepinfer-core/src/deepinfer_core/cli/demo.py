"""`deepinfer demo`: a small made-up model, end to end, offline."""

from __future__ import annotations

import tempfile
from pathlib import Path

from deepinfer_core.cli.options import reports_errors, with_engine_config
from deepinfer_core.config import EngineConfig

__all__ = ["demo"]

MAX_TOKENS = 32

_PROMPTS = (
    "Once upon a time there was a scheduler that",
    "The shortest proof of this theorem is",
    "def fibonacci(n):",
)


@reports_errors
@with_engine_config(("accelerator", "numerics", "determinism"))
def demo(*, config: EngineConfig) -> None:
    """Write a model of a few MB with random weights and generate text with it.

    It has the real architecture and file format, so this shows the engine at work, not a language.
    """
    from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
    from deepinfer_core.cli.progress import rates
    from deepinfer_core.llm import LLM
    from deepinfer_core.types import SamplingParams

    with tempfile.TemporaryDirectory(prefix="deepinfer-demo-") as folder:
        write_checkpoint(folder, demo_config(), seed=0)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"A model of {size / 2**20:.1f} MiB with random weights: the text means nothing.\n")
        options = config.model_copy(update={"model": folder})
        with LLM(config=options) as llm:
            params = SamplingParams(max_tokens=MAX_TOKENS, seed=0, ignore_eos=True)
            *batch, last = _PROMPTS
            print("A batch:")
            for prompt, output in zip(batch, llm.generate(batch, params), strict=True):
                print(f"  {prompt!r}\n    -> {output.text!r}")
            print("\nA stream:")
            print(f"  {last!r}\n    -> ", end="", flush=True)
            for output in llm.stream(last, params):
                print(repr(output.delta)[1:-1], end="", flush=True)
            print(f"\n\nSpeed: {rates(llm.engine.stats)}")
