"""What a plan is made for: loads that may come, as scenarios, from loads that were counted.

On the window it is made for every sensible plan is within 1 % of perfect. On the interval that it
serves it is not, and what it is made for decides by how much. A mean over windows is better than
the last window in bursty traffic and worse where traffic drifts. Scenarios serve both: the pieces
of the last few windows, recent ones with more weight, each a load that may come again.

One thing they get wrong: an expert that has become hot, or cold, for good looks as if its old load
came back now and then. So where all pieces of an expert in the last window lie above, or below, all
of an older window's, and the means differ by more than a factor of `_JUMP`, the old pieces are
scaled to the new mean: their ups and downs stay, their level goes. And where two neighbouring
windows differ far more than any others do, the traffic has become another, and what is older than
that break is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_eplb.maps import Floats

__all__ = ["Forecast", "forecast"]

# Measured in the simulator over all regimes, decode at EP64.
# 0.90 and 0.96 are as good on average, 1.0 is worse.
_DECAY = 0.93  # weight of a piece over that of the next younger one
# Over 18 seeds of `shift` the ratio is lower by 0.003 for these two; others are as before.
_BREAK = 2.0
_CLEAR_BREAK = 10.0
# 1.3 costs a third of what scenarios gain in drift; without the rule hot experts are planned worse
# than by the last window alone.
_JUMP = 3.0
_SPREAD = 0.67  # standard deviations above the mean, of the load that replicas are counted for
_MOST_LOAD = 1e3  # of a rank, in units of the mean: its eighth power is added up in float32


@dataclass(frozen=True)
class Forecast:
    """Loads that may come.

    Attributes:
        scenarios: [L, H, E] float64, scaled so that a rank has 1 on average over scenarios (less
            where one expert is so heavy that powers of its load would overflow).
        weights: [L, H] float64, how likely each is; they sum to 1 in a layer.
        demand: [L, E] float64, what replicas are counted for.
    """

    scenarios: Floats
    weights: Floats
    demand: Floats


def forecast(
    loads: Floats, history: Floats | None, pieces_per_window: int, num_ranks: int
) -> Forecast:
    """Return what to plan for.

    Args:
        loads: [L, E], of the last window; all there is to plan for without `history`.
        history: [H, L, E], pieces of windows, oldest first, the last window's at the end; or None.
            A layer with no hits in any of them is planned for its `loads`.
        pieces_per_window: of `history`.
        num_ranks: ranks that share the load.
    """
    if history is None:
        pieces = loads[:, None]
        weights = np.ones((len(loads), 1))
    else:
        pieces = _settled(history, pieces_per_window).transpose(1, 0, 2)
        silent = ~pieces.any((1, 2))
        pieces[silent] = loads[silent, None]
        weights = _DECAY ** np.arange(len(history), dtype=np.float64)[::-1]
        weights = np.where(_current(history, pieces_per_window), weights, 0.0)
    # Where all that counts is silence, experts are taken to be alike.
    pieces[(weights[..., None] * pieces).sum((1, 2)) == 0] = 1.0
    weights /= weights.sum(1, keepdims=True)
    # A piece with few tokens is a short time to wait, so it stays as small as it is.
    total = np.einsum("lh,lhe->l", weights, pieces)
    scenarios = pieces * (num_ranks / total)[:, None, None]
    heaviest = scenarios.sum(-1).max(-1)
    scenarios /= np.maximum(heaviest / _MOST_LOAD, 1.0)[:, None, None]
    mean = np.einsum("lh,lhe->le", weights, scenarios)
    deviation = np.sqrt(np.einsum("lh,lhe->le", weights, (scenarios - mean[:, None]) ** 2))
    return Forecast(np.ascontiguousarray(scenarios), weights, mean + _SPREAD * deviation)


def _current(history: Floats, pieces_per_window: int) -> NDArray[np.bool_]:
    """Return which pieces are from after the last break, [L, H].

    A break is where neighbouring windows are `_BREAK` times as far apart as any other neighbours
    and further than pieces are from their own window, or `_CLEAR_BREAK` times as far as that: the
    traffic was one thing for some time, and then another. Nothing is known of windows without
    tokens.
    """
    ends = range(len(history), 0, -pieces_per_window)
    windows = [history[max(end - pieces_per_window, 0) : end] for end in ends][::-1]
    current = np.ones((history.shape[1], len(history)), bool)
    if len(windows) < 2:
        return current
    levels = np.stack([_shares(window.sum(0)) for window in windows])
    busy: NDArray[np.bool_] = levels.sum(-1) > 0  # [windows, L]
    distances = [
        np.abs(_shares(window) - level).sum(-1).mean(0)
        for window, level in zip(windows, levels, strict=True)
    ]
    apart = np.where(busy[1:] & busy[:-1], np.abs(np.diff(levels, axis=0)).sum(-1), 0.0)
    for place in range(len(apart)):
        others = np.delete(apart, place, 0).max(0) if len(apart) > 1 else np.inf
        within = np.maximum(distances[place], distances[place + 1])
        first = len(history) - (len(apart) - place) * pieces_per_window
        least = np.minimum(np.maximum(_BREAK * others, within), _CLEAR_BREAK * within)
        current[apart[place] > least, :first] = False
    return current


def _shares(loads: Floats) -> Floats:
    """Return the share of each expert, [..., E]; zeros where there are no tokens."""
    total = loads.sum(-1, keepdims=True)
    return loads / np.where(total > 0, total, 1.0)


def _settled(history: Floats, pieces_per_window: int) -> Floats:
    """Return pieces [H, L, E] in which experts that changed for good have their new level.

    Levels are shares of a layer's tokens: more traffic for all is no reason to plan otherwise.
    """
    settled = history.copy()
    total = history.sum(-1, keepdims=True)
    shares = _shares(history)
    busy = np.broadcast_to(total > 0, shares.shape)
    last = slice(len(history) - pieces_per_window, None)
    lowest, highest, level = _range(shares[last], busy[last])
    for end in range(len(history) - pieces_per_window, 0, -pieces_per_window):
        window = slice(max(end - pieces_per_window, 0), end)
        old_lowest, old_highest, old = _range(shares[window], busy[window])
        risen = (lowest > old_highest) & (level > _JUMP * old)
        fallen = (highest < old_lowest) & (level * _JUMP < old)
        changed = (risen | fallen) & busy[window].any(0) & busy[last].any(0)
        # an expert that nobody chose has no ups and downs to keep: it gets the level as it is
        scaled = np.where(
            old > 0, history[window] * (level / np.where(old > 0, old, 1.0)), level * total[window]
        )
        settled[window] = np.where(changed, scaled, history[window])
    return settled


def _range(shares: Floats, busy: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Return least, most and mean of a window's pieces with tokens, [L, E] each."""
    least = shares.min(0, where=busy, initial=np.inf)
    most = shares.max(0, where=busy, initial=0.0)
    return least, most, shares.sum(0) / np.maximum(busy.sum(0), 1)
