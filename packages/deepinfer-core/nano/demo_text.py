"""The answers of `deepinfer demo`, word by word, for the test that asserts them.

    python -m nano.demo_text [--model FOLDER] OUT

writes the file that the test compares with. Greedy and strict. A margin is how far a token's logit
is above the second best one; where all are large, another CPU gives the same text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cli.demo import MAX_TOKENS, PROMPTS
from deepinfer_core.loader import find_recipe
from deepinfer_core.model.hub import resolve_model

__all__ = ["DemoText", "demo_texts", "main"]


@dataclass(frozen=True)
class DemoText:
    """One answer.

    Attributes:
        question: what was asked.
        message: the assistant's message, as in Chat Completions, without ids of calls.
        finish_reason: `stop` or `tool_calls`; `length` if it was cut off.
        margin: the smallest one of its tokens.
    """

    question: str
    message: dict[str, Any]
    finish_reason: str
    margin: float


def demo_texts(folder: Path) -> Iterator[DemoText]:
    """Yield the answers to the prompts of the demo."""
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, determinism="strict"
    )
    with LLM(folder, accelerator="cpu", numerics="release") as llm:
        model = llm.engine.model_config
        recipe = find_recipe(model.model_type, folder / "tokenizer.json")
        for prompt in PROMPTS:
            prepared = recipe.prepare(prompt.body)
            [output] = llm.generate([{"prompt_token_ids": prepared.token_ids}], params)
            assert output.logprobs is not None and output.finish_reason is not None
            reply = prepared.reply("demo", "demo", 0)
            reply.start(len(prepared.token_ids), 0)
            reply.push([each for each in output.token_ids if each not in model.eos_token_ids])
            reply.finish("length" if output.finish_reason == "length" else "stop")
            response: dict[str, Any] = reply.response()
            [choice] = response["choices"]
            for call in choice["message"].get("tool_calls") or ():
                del call["id"]
            margins = [each.top[0][1] - each.top[1][1] for each in output.logprobs]
            yield DemoText(
                prompt.question, choice["message"], choice["finish_reason"], min(margins)
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the answers to a file."""
    parser = argparse.ArgumentParser(prog="nano.demo_text")
    parser.add_argument("--model", help="folder; default: the model that comes with the package")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    texts = [asdict(each) for each in demo_texts(resolve_model(options.model))]
    for text in texts:
        print(text["question"], "->", text["message"], f"margin {text['margin']:.3f}")
        text["margin"] = round(text["margin"], 3)
    content = json.dumps(texts, ensure_ascii=False, indent=2) + "\n"
    options.out.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
