"""Limits of the scheduler, and how much growth admission expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.cache.block_table import num_blocks_for
from deepinfer_core.errors import ConfigError, RequestError

__all__ = ["GrowthEstimate", "SchedulerLimits", "check_prompt"]

PERMILLE = 1000


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may use. All values are integers.

    Args:
        block_size: tokens a block; even, so that compression groups stay inside blocks.
        num_blocks: pool name -> number of blocks.
        num_slots: most sequences on the device.
        num_stored: window states of published prefixes that are kept besides; strict requests
            resume from these alone.
        max_model_len: most tokens of prompt and output together.
        max_step_tokens: most tokens of a prefill step.
        max_chunk_tokens: most tokens of one sequence in a prefill step.
        window: length of attention windows.
        history_len: token ids before its first computed position that the model looks back at.
        max_drafts: most drafts verified with a decode row.
        prefill_run_max: prefill steps in a row while some sequence waits to decode.
        prefix_cache: publish whole blocks, so that later requests with the same prefix start there.
        step_budget_ns: time that a prefill step is to take at most, by a cost model; 0 is no rule.
        vocab_size: for the masks of constrained requests.
        growth_horizon: most output tokens that admission expects of a request.
        growth_permille: share of them it reserves at the start; rises with preemptions and decays.
    """

    block_size: int
    num_blocks: Mapping[str, int] = field(hash=False)
    num_slots: int
    max_model_len: int
    max_step_tokens: int
    max_chunk_tokens: int
    window: int
    history_len: int = 0
    max_drafts: int = 0
    num_stored: int = 0
    prefill_run_max: int = 2
    prefix_cache: bool = False
    step_budget_ns: int = 0
    vocab_size: int = 0
    growth_horizon: int = 512
    growth_permille: int = 400

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "num_blocks", dict(self.num_blocks))
        lows = {
            "block_size": 2, "num_slots": 1, "max_model_len": 2, "max_step_tokens": 1,
            "max_chunk_tokens": 1, "window": 0, "history_len": 0, "max_drafts": 0,
            "prefill_run_max": 1, "growth_horizon": 0, "growth_permille": 0, "num_stored": 0,
            "step_budget_ns": 0, "vocab_size": 0,
        }  # fmt: skip
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; it must be at least {low}.")
        if self.block_size % 2:
            raise ConfigError(
                f"`block_size` is {self.block_size}; it must be even: compression pairs tokens."
            )
        if not self.num_blocks:
            raise ConfigError("`num_blocks` names no pool.")
        for pool, count in self.num_blocks.items():
            if count < 1:
                raise ConfigError(f"Pool {pool!r} has {count} blocks; it needs at least 1.")

    @property
    def table_len(self) -> int:
        """Blocks of the longest sequence; drafts may reach past its end."""
        return num_blocks_for(self.max_model_len + self.max_drafts, self.block_size)


def check_prompt(length: int, limits: SchedulerLimits) -> None:
    """Check that a prompt of `length` tokens can be served by an engine that does nothing else.

    Raises:
        RequestError: it is empty, too long for the context, or can never fit into the cache.
    """
    if not length:
        raise RequestError("The prompt is empty; it needs at least 1 token.", param="prompt")
    if length >= limits.max_model_len:
        raise RequestError(
            f"The prompt has {length} tokens, but the context is {limits.max_model_len} tokens "
            f"and at least 1 must be left for the output. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    needed = num_blocks_for(length, limits.block_size) + 1
    total = min(limits.num_blocks.values())
    if needed > total:
        raise RequestError(
            f"The prompt has {length} tokens and needs {needed} blocks of {limits.block_size} "
            f"tokens with room for an output, but the cache has {total}. Shorten the prompt or "
            f"give the engine more cache.",
            param="prompt",
            code="never_fits",
        )


class GrowthEstimate:
    """How many output tokens to keep room for when a sequence is admitted.

    Too little and decoding preempts what was just admitted; too much and memory idles. So the share
    rises by a quarter of its start value with a preemption and falls by 1/1000 with a decode step.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        """Start with the configured share."""
        self._horizon = limits.growth_horizon
        self._start = limits.growth_permille
        self._share = limits.growth_permille

    def tokens(self, remaining: int) -> int:
        """Return the expected output of a request that may still produce `remaining` tokens."""
        return min(remaining, self._horizon) * self._share // PERMILLE

    def tokens_each(self, remaining: np.ndarray) -> np.ndarray:
        """Return the same for many, [n] int64."""
        expected: np.ndarray = np.minimum(remaining, self._horizon) * self._share // PERMILLE
        return expected

    def preempted(self) -> None:
        """Raise the share."""
        self._share = min(max(PERMILLE, self._start), self._share + max(1, self._start // 4))

    def decoded(self) -> None:
        """Lower the share, down to a quarter of its start value."""
        self._share = max(self._start // 4, self._share - 1)
