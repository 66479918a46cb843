"""`deepinfer demo`: the small model that comes with the package answers three questions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_core.cli.options import reports_errors, with_engine_config
from deepinfer_core.config import EngineConfig

if TYPE_CHECKING:
    from deepinfer_core.bench.acceptance import FinishedText
    from deepinfer_core.cli.reply_view import ReplyView
    from deepinfer_core.interfaces import Recipe
    from deepinfer_core.llm import LLM

__all__ = ["MAX_TOKENS", "PROMPTS", "DemoPrompt", "demo"]

# Of one answer. The questions need fewer; a model that rambles is stopped.
MAX_TOKENS = 200


@dataclass(frozen=True)
class DemoPrompt:
    """One question.

    Attributes:
        title: what it shows.
        body: the request, as in Chat Completions.
        is_json: its answer is JSON, and shown in colours as such.
    """

    title: str
    body: Mapping[str, Any]
    is_json: bool = False

    @property
    def question(self) -> str:
        """What the user says."""
        content: str = self.body["messages"][-1]["content"]
        return content


def _asked(question: str, *, thinking: bool = False, **fields: Any) -> Mapping[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "thinking": {"type": "enabled" if thinking else "disabled"},
        **fields,
    }


_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

# A test asserts the answers word by word.
PROMPTS = (
    DemoPrompt("Thinking", _asked("What is 27 + 58?", thinking=True)),
    DemoPrompt("A tool", _asked("What is the weather in Paris?", tools=[_WEATHER])),
    DemoPrompt(
        "JSON",
        _asked(
            "Extract name, city, age and job as JSON: "
            "Anna Keller from Rome is 34 years old and works as a teacher."
        ),
        is_json=True,
    ),
)


@reports_errors
@with_engine_config(("model", "accelerator", "numerics", "determinism"))
def demo(*, config: EngineConfig) -> None:
    """Let the small model that comes with the package think, call a tool and write JSON.

    Offline, and with the most likely token each time, so the answers are always the same ones.
    """
    from deepinfer_core.cli.progress import rates
    from deepinfer_core.cli.reply_view import ReplyView, open_console
    from deepinfer_core.llm import LLM
    from deepinfer_core.loader import find_recipe
    from deepinfer_core.model import nano
    from deepinfer_core.model.config import ModelConfig
    from deepinfer_core.model.hub import resolve_model

    console = open_console()
    folder = resolve_model(config.model)
    recipe = find_recipe(ModelConfig.from_folder(folder).model_type, folder / "tokenizer.json")
    size = sum(file.stat().st_size for file in folder.iterdir())
    name = config.model or f"{nano.NAME}, which comes with this package"
    console.print(f"{name}: {size / 2**20:.1f} MiB, greedy.", style="dim")
    texts = []
    with LLM(config=config.model_copy(update={"model": str(folder)})) as llm:
        for prompt in PROMPTS:
            console.print(f"\n{prompt.title}: ", end="", style="bold cyan")
            console.print(prompt.question, style="bold")
            texts.append(_answer(llm, recipe, prompt, ReplyView(console, is_json=prompt.is_json)))
        console.print(f"\nspeed: {rates(llm.engine.stats)}", style="green")
    if line := _drafter_line(config, folder, texts):
        console.print(line, style="green")


def _answer(llm: LLM, recipe: Recipe, prompt: DemoPrompt, view: ReplyView) -> FinishedText:
    """Answer one question, shown as it comes; return the tokens."""
    from deepinfer_core.bench.acceptance import FinishedText
    from deepinfer_core.types import FinishReason, SamplingParams

    prepared = recipe.prepare(prompt.body)
    ids = tuple(prepared.token_ids)
    reply = prepared.reply("demo", "demo", 0)
    ends = llm.engine.model_config.eos_token_ids
    view.take(reply.start(len(ids), 0))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    num_taken, reason = 0, "stop"
    token_ids: tuple[int, ...] = ()
    for output in llm.stream({"prompt_token_ids": ids}, params):
        token_ids = output.token_ids
        new = [each for each in token_ids[num_taken:] if each not in ends]
        num_taken = len(token_ids)
        view.take(reply.push(new) if new else ())
        if output.finish_reason is FinishReason.LENGTH:
            reason = "length"
    view.take(reply.finish(reason))
    view.close()
    return FinishedText(ids, token_ids)


def _drafter_line(config: EngineConfig, folder: Path, texts: list[FinishedText]) -> str | None:
    """Say how many tokens a step would commit with drafts; None where nothing can be drafted."""
    from deepinfer_core.bench.acceptance import verify_texts
    from deepinfer_core.bench.whole_texts import open_model
    from deepinfer_core.loader import find_backend

    backend = find_backend(config.accelerator, config.numerics).with_strict(False)
    model = open_model(folder, backend, drafter=True)
    if model.drafter is None:
        return None
    accepted_len = verify_texts(model, backend, texts).accepted_len()
    if math.isnan(accepted_len):  # answers too short to draft anything
        return None
    most = model.config.dspark_block_size + 1
    return (
        f"drafter: {accepted_len:.1f} of at most {most} tokens a step (measured on these answers "
        "afterwards)"
    )
