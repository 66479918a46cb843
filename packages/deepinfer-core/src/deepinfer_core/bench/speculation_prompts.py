"""Prompts to decode behind: questions that the small model of the package knows, or random ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from deepinfer_core.loader import find_recipe
from deepinfer_core.model import nano
from deepinfer_core.model.config import ModelConfig

__all__ = ["knows_tasks", "prompts_of"]

_RANDOM_LEN = 64
_FIRST_PLAIN_ID = 8  # the lowest ids are special tokens

_WORDS = (
    "apple", "bread", "bridge", "camera", "cheese", "clock", "forest", "garden", "glass", "island",
    "lamp", "lemon", "letter", "mountain", "music", "paper", "silver", "tiger", "tower", "window",
)  # fmt: skip
_VERBS = ("sees", "likes", "finds", "follows", "holds", "needs", "brings", "opens")
_NAMES = ("Anna Keller", "Paul Weber", "Laura Rossi", "David Novak", "Maria Lopez", "Tom Baker")
_CITIES = ("Rome", "Paris", "Vienna", "Madrid", "Berlin", "Oslo", "Prague", "Lisbon")
_JOBS = ("teacher", "nurse", "pilot", "baker", "farmer", "painter")
_FACTS = ("Who are you?", "What is DeepInfer?", "What is your name?", "Hello", "Good morning")
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


def knows_tasks(folder: Path) -> bool:
    """Return whether a model is the small one that comes with the package."""
    return folder.name == nano.folder().name and folder.samefile(nano.folder())


def prompts_of(folder: Path, config: ModelConfig, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return `count` prompts as ids; the same ones for the same seed.

    Args:
        folder: the model's. The one that comes with the package gets questions of the kinds it was
            trained on, in its recipe's format; any other gets 64 random ids.
        config: the model's.
        count: how many.
        seed: decides them.

    Raises:
        ConfigError: questions need the recipe of the model, and it is not installed.
    """
    random = Random(seed)
    if not knows_tasks(folder):
        ids = [
            token_id
            for token_id in range(_FIRST_PLAIN_ID, config.vocab_size)
            if token_id != config.image_token_id
        ]
        return [tuple(random.choices(ids, k=_RANDOM_LEN)) for _ in range(count)]
    recipe = find_recipe(config.model_type, folder / "tokenizer.json")
    # all kinds in turn, so that a short run has every one
    bodies = [_KINDS[place % len(_KINDS)](random) for place in range(count)]
    return [tuple(recipe.prepare(body).token_ids) for body in bodies]


def _asked(question: str, *, thinking: bool = False, **fields: Any) -> Mapping[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "thinking": {"type": "enabled" if thinking else "disabled"},
        **fields,
    }


def _sum_by_steps(random: Random) -> Mapping[str, Any]:
    a, b = random.randint(100, 999), random.randint(100, 999)
    return _asked(f"What is {a} + {b}?", thinking=True)


def _json(random: Random) -> Mapping[str, Any]:
    name, city, job = random.choice(_NAMES), random.choice(_CITIES), random.choice(_JOBS)
    return _asked(
        "Extract name, city, age and job as JSON: "
        f"{name} from {city} is {random.randint(20, 70)} years old and works as a {job}."
    )


def _sorted(random: Random) -> Mapping[str, Any]:
    items = ", ".join(map(str, random.sample(range(1, 100), 6)))
    return _asked(f"Sort in ascending order: {items}")


def _call(random: Random) -> Mapping[str, Any]:
    return _asked(f"What is the weather in {random.choice(_CITIES)}?", tools=[_WEATHER])


def _copied(random: Random) -> Mapping[str, Any]:
    one, two, three = random.sample(_WORDS, 3)
    text = f"The {one} {random.choice(_VERBS)} the {two} and the {three}."
    return _asked(f'Repeat the sentence "{text}"')


def _reversed(random: Random) -> Mapping[str, Any]:
    return _asked(f"Reverse this list: {', '.join(random.sample(_WORDS, 5))}")


def _bytes(random: Random) -> Mapping[str, Any]:
    return _asked(f"How many bytes are {random.randint(2, 32)} KiB?", thinking=True)


def _fact(random: Random) -> Mapping[str, Any]:
    return _asked(random.choice(_FACTS))


_KINDS = (_sum_by_steps, _json, _sorted, _call, _copied, _reversed, _bytes, _fact)
