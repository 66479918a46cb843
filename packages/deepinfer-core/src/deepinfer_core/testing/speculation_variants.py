"""Every way to verify drafts, and requests of all kinds, whose texts must not depend on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_core import LLM, EngineConfig, RequestOutput, SamplingParams
from deepinfer_core.bench.speculation_prompts import prompts_of
from deepinfer_core.engine.speculation import fingerprint
from deepinfer_core.loader import find_backend, find_verifier
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.hub import resolve_model

__all__ = ["Mixed", "Variant", "answers", "mixed_requests", "variants", "write_steep_costs"]

Answer = tuple[tuple[int, ...], str, str, object]


@dataclass(frozen=True)
class Variant:
    """Options of an engine under which texts must be those of plain decoding."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixed:
    """Requests: prompts as ids, and the settings of each."""

    prompts: Sequence[tuple[int, ...]]
    params: Sequence[SamplingParams]


def variants(num_drafts: int, costs: Path) -> list[Variant]:
    """Return plain decoding first, serially, then every policy and length, at depth 0 and 2.

    Args:
        num_drafts: of the model's blocks.
        costs: a table that makes `delayed` leave drafts out.
    """
    policies: dict[str, dict[str, object]] = {"off": {"speculation": "off"}}
    for count in range(1, num_drafts + 1):
        policies[f"fixed {count}"] = {"speculation": "fixed", "num_drafts": count}
    policies["threshold"] = {"speculation": "threshold", "speculation_threshold": 0.8}
    policies["delayed"] = {"speculation": "delayed", "speculation_costs": str(costs)}
    return [
        Variant(f"{name}, depth {depth}", {**options, "depth": depth})
        for name, options in policies.items()
        for depth in (0, 2)
    ]


def write_steep_costs(path: Path, config: EngineConfig) -> None:
    """Write a made-up table of an engine whose rows cost so much that only good drafts pay.

    Its times are far from any that are measured, so that these do not correct it.
    """
    folder = resolve_model(config.model)
    backend = find_backend(config.accelerator, config.numerics)
    verifier_class = find_verifier()
    assert verifier_class is not None, "deepinfer-specdec is not installed"
    num_drafts = config.num_drafts or ModelConfig.from_folder(folder).dspark_block_size
    with LLM(config=config):  # sets the number of threads, which is part of the fingerprint
        origin = fingerprint(config, backend, folder, num_drafts)
    samples = {rows: [1000.0 + 300 * rows] for rows in (1, 64)}
    verifier_class.write_costs(path, samples, fingerprint=origin)


def mixed_requests(
    folder: Path, count: int, tokens: int, seed: int = 0, *, longest: int | None = None
) -> Mixed:
    """Return requests with every kind of setting in turn, greedy and sampled with seeds.

    Args:
        folder: the model's.
        count: how many.
        tokens: most of an answer.
        seed: decides prompts and the requests' own seeds.
        longest: most tokens of a prompt, which leaves out some of those that call tools.
    """
    drawn = prompts_of(folder, ModelConfig.from_folder(folder), 2 * count, seed)
    prompts = [each for each in drawn if longest is None or len(each) <= longest][:count]
    # the factor moves settings along the kinds of prompts from round to round
    params = [
        _settings(place * 3 + place // 8, tokens, 1000 * seed + place) for place in range(count)
    ]
    return Mixed(prompts, params)


def answers(llm: LLM, mixed: Mixed) -> list[Answer]:
    """Return what must be equal of each answer: ids, text, how it ended, log-probabilities."""
    return [_answer(output) for output in llm.generate(mixed.prompts, mixed.params)]


def _answer(output: RequestOutput) -> Answer:
    return output.token_ids, output.text, str(output.finish_reason), output.logprobs


def _settings(kind: int, tokens: int, seed: int) -> SamplingParams:
    # The small model is sure of itself: below temperatures of 2 its samples are its greedy answers,
    # and noise in the wrong place would not show.
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 2.5},
        {"temperature": 3.0, "top_k": 20, "top_p": 0.95, "logprobs": 2},
        {"temperature": 4.0, "min_p": 0.01, "ignore_eos": True},
        {
            "temperature": 0.0,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "ignore_eos": True,
            "logprobs": 0,
        },
        {"temperature": 2.0, "logit_bias": {300: 4.0, 16: -3.0}, "presence_penalty": 0.5},
        {"temperature": 0.0, "stop": ("9", "er", "o")},
        {"temperature": 0.0, "max_tokens": max(tokens // 2 - 1, 2), "stop_token_ids": (16, 17)},
    )
    return SamplingParams(**{"max_tokens": tokens, "seed": seed, **kinds[kind % len(kinds)]})
