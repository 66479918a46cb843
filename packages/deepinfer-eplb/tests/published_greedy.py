"""The base line: the published greedy for one level of experts, in plain numpy.

As it is described: every spare slot goes to the expert with the largest load per replica; then
replicas, heaviest first, go to the lightest rank that has a free slot. Nothing keeps a rank from
getting two replicas of one expert, and nothing looks at the map that is live.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def published_greedy(
    loads: NDArray[np.float64], num_ranks: int, slots_per_rank: int
) -> NDArray[np.int32]:
    """Return a map [L, R * S] int32 for loads [L, E]."""
    maps = [_layer(layer, num_ranks, slots_per_rank) for layer in loads]
    return np.stack(maps).astype(np.int32)


def _layer(load: NDArray[np.float64], num_ranks: int, slots_per_rank: int) -> NDArray[np.int64]:
    counts = np.ones(len(load), int)
    for _ in range(num_ranks * slots_per_rank - len(load)):
        counts[np.argmax(load / counts)] += 1
    replicas = np.repeat(np.arange(len(load)), counts)
    weights = (load / counts)[replicas]
    total = np.zeros(num_ranks)
    used = np.zeros(num_ranks, int)
    ranks = np.full((num_ranks, slots_per_rank), -1)
    for k in np.argsort(-weights, kind="stable"):
        rank = int(np.argmin(np.where(used < slots_per_rank, total, np.inf)))
        ranks[rank, used[rank]] = replicas[k]
        used[rank] += 1
        total[rank] += weights[k]
    return ranks.ravel()
