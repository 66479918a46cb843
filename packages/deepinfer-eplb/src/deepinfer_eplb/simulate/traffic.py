"""Made-up traffic: how often each expert is chosen, over time, in five regimes.

A layer's experts have a popularity of their own (logits of standard deviation `base_spread`), and
each of `num_topics` topics (languages, code, maths, a customer's product) prefers experts of its
own (logits of `topic_spread`). At any time the traffic is a mix of topics; an expert's share is

    share[t, l, e] = sum_k mix[t, k] * softmax_e(base[l] + topic[k, l])

and the hits of a piece are drawn from that: a Poisson count for each expert, as independent tokens
would give. What differs between regimes is the mix, and for `hot` the experts themselves:

    stationary  the mix stays as it is
    drift       logits of the mix wander: an Ornstein-Uhlenbeck walk, half of whose memory is gone
                after `drift_half_life` intervals
    shift       the mix is drawn anew at random moments, once every `shift_every` intervals on
                average
    hot         stationary, and each layer has at any time about `hot_experts` experts that take
                `hot_factor` times their share, each for about an interval
    bursty      bursts of one topic come and go at random: about `burst_rate` begin in an interval,
                each lasts a geometric number of pieces (mean `burst_pieces`) and adds up to
                `burst_share` to its topic before the mix is normalised

All regimes of one seed share popularity and topics, so they differ in time alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_eplb.errors import SettingError

__all__ = ["REGIMES", "Traffic", "generate"]

REGIMES = ("stationary", "drift", "shift", "hot", "bursty")


_WHOLE = {"num_layers", "num_experts", "steps_per_piece", "pieces_per_interval", "num_topics"}
_ABOVE_ZERO = {"hits_per_step", "drift_half_life", "shift_every", "burst_pieces", "hot_factor"}
_MOST = 1e9


def _fits(name: str, value: float) -> bool:
    least = 1.0 if name in _WHOLE or name == "burst_pieces" else 0.0
    return least <= value <= _MOST and (value > 0 or name not in _ABOVE_ZERO)


@dataclass(frozen=True)
class Traffic:
    """What the traffic looks like.

    Attributes:
        num_layers, num_experts: of the model.
        hits_per_step: expert choices of one step in one layer: rows of all ranks x experts a token.
        steps_per_piece: decoding steps whose hits are counted together.
        pieces_per_interval: pieces from one plan to the next.
        num_topics, base_spread, topic_spread: see the module's text.
        mix_spread: standard deviation of the logits of the mix.
        drift_half_life, shift_every: in intervals.
        hot_experts, hot_factor: of a layer at any time; by how much their share is raised.
        burst_rate, burst_pieces, burst_share: begun in an interval; mean length, from 1; most that
            one adds to its topic.
    """

    num_layers: int = 6
    num_experts: int = 384
    hits_per_step: float = 64 * 60 * 6
    steps_per_piece: int = 100
    pieces_per_interval: int = 100
    num_topics: int = 12
    base_spread: float = 0.5
    topic_spread: float = 1.0
    mix_spread: float = 1.0
    drift_half_life: float = 2.0
    shift_every: float = 4.0
    hot_experts: float = 2.0
    hot_factor: float = 6.0
    burst_rate: float = 20.0
    burst_pieces: float = 4.0
    burst_share: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SettingError: one is out of range.
        """
        for name, value in vars(self).items():
            whole = name in _WHOLE
            kind = int if whole else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not _fits(name, value):
                what = "whole numbers from 1" if whole else "numbers from 0"
                if name in _ABOVE_ZERO:
                    what = "numbers above 0"
                raise SettingError(f"`{name}` is {value!r}; allowed: {what}, to {_MOST:g}.")


def generate(regime: str, intervals: int, seed: int, traffic: Traffic) -> NDArray[np.int64]:
    """Return hits of each expert: [intervals * pieces_per_interval, layers, experts] int64.

    Args:
        regime: one of `REGIMES`.
        intervals: how long, in intervals between plans.
        seed: same seed and settings, same traffic.
        traffic: the settings.
    Raises:
        SettingError: the regime is unknown.
    """
    if regime not in REGIMES:
        raise SettingError(f"`regime` is {regime!r}; allowed: {', '.join(map(repr, REGIMES))}.")
    layers, experts, topics = traffic.num_layers, traffic.num_experts, traffic.num_topics
    fixed = np.random.default_rng([seed, 0])
    base = fixed.normal(0.0, traffic.base_spread, (layers, experts))
    topic = fixed.normal(0.0, traffic.topic_spread, (topics, layers, experts))
    preference = np.exp(base + topic)
    preference /= preference.sum(-1, keepdims=True)
    start = fixed.normal(0.0, traffic.mix_spread, topics)

    moving = np.random.default_rng([seed, 1 + REGIMES.index(regime)])
    pieces = intervals * traffic.pieces_per_interval
    weights = _mix(regime, pieces, start, moving, traffic)
    hits = np.empty((pieces, layers, experts), np.int64)
    factor = _hot(pieces, moving, traffic) if regime == "hot" else None
    for t in range(pieces):
        share = np.einsum("k,kle->le", weights[t], preference)
        if factor is not None:
            share *= factor[t]
        share /= share.sum(-1, keepdims=True)
        hits[t] = moving.poisson(share * (traffic.hits_per_step * traffic.steps_per_piece))
    return hits


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers: NDArray[np.float64] = np.exp(logits - logits.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return powers


def _mix(
    regime: str,
    pieces: int,
    start: NDArray[np.float64],
    moving: np.random.Generator,
    traffic: Traffic,
) -> NDArray[np.float64]:
    """Return the share of each topic in each piece, [pieces, topics]."""
    logits = np.repeat(start[None], pieces, 0)
    if regime == "drift":
        keep = 0.5 ** (1 / (traffic.drift_half_life * traffic.pieces_per_interval))
        noise = moving.normal(0.0, traffic.mix_spread * np.sqrt(1 - keep**2), logits.shape)
        for t in range(1, pieces):
            logits[t] = keep * logits[t - 1] + noise[t]
    elif regime == "shift":
        chance = 1 / (traffic.shift_every * traffic.pieces_per_interval)
        for t in range(1, pieces):
            again = moving.random() < chance
            drawn = moving.normal(0.0, traffic.mix_spread, len(start))
            logits[t] = drawn if again else logits[t - 1]
    weights: NDArray[np.float64] = _softmax(logits)
    if regime == "bursty":
        begins = moving.poisson(traffic.burst_rate / traffic.pieces_per_interval, pieces)
        for t in np.flatnonzero(begins).tolist():
            for _ in range(begins[t]):
                length = moving.geometric(1 / traffic.burst_pieces)
                added = traffic.burst_share * moving.random()
                weights[t : t + length, moving.integers(len(start))] += added
        weights /= weights.sum(-1, keepdims=True)
    return weights


def _hot(pieces: int, moving: np.random.Generator, traffic: Traffic) -> NDArray[np.float64]:
    """Return by how much each expert's share is raised, [pieces, layers, experts]."""
    factor = np.ones((pieces, traffic.num_layers, traffic.num_experts))
    per_piece = traffic.hot_experts / traffic.pieces_per_interval
    for layer in range(traffic.num_layers):
        # as if it had run for a while: those that began before the first piece still count
        early = traffic.pieces_per_interval
        for t in range(-early, pieces):
            for _ in range(moving.poisson(per_piece)):
                expert = moving.integers(traffic.num_experts)
                end = t + moving.geometric(1 / traffic.pieces_per_interval)
                if end > 0:
                    factor[max(t, 0) : end, layer, expert] = traffic.hot_factor
    return factor
