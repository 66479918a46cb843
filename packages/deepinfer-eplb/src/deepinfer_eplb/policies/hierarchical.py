"""The policy `hierarchical`: experts of one routing group stay on one node.

For routers that pick whole groups first, so that a token's traffic stays inside a node. Groups go
to nodes as experts go to ranks, only without replicas; then each node is planned alone, its experts
over its ranks, by the policy `global`.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.forecast import Forecast
from deepinfer_eplb.maps import Floats, Layout, Longs, num_arrivals
from deepinfer_eplb.policies import flat

__all__ = ["check", "full", "incremental", "keeps_groups", "relabel"]


def check(num_experts: int, groups: int | None, layout: Layout) -> int:
    """Return the number of groups if this policy can serve them.

    Raises:
        PlanInputError: a number does not divide another, or nodes have lost different numbers of
            ranks; with numbers that work.
    """
    nodes = layout.num_nodes
    if groups is None:
        raise PlanInputError(
            "`groups` is None, but the policy 'hierarchical' needs the router's number of expert "
            "groups; give it, or use the policy 'global'."
        )
    if num_experts % groups or groups % nodes:
        works = [g for g in range(1, num_experts + 1) if num_experts % g == 0 and g % nodes == 0]
        advice = f"`groups` {_list(works)}, or " if works else ""
        raise PlanInputError(
            f"`groups` is {groups}: the policy 'hierarchical' needs groups that divide "
            f"{num_experts} experts and that {nodes} nodes divide; give {advice}the policy "
            "'global'."
        )
    left = np.bincount(layout.active // (layout.num_ranks // nodes), minlength=nodes)
    if len(set(left.tolist())) > 1:
        raise PlanInputError(
            f"Nodes have {left.tolist()} ranks left: the policy 'hierarchical' needs the same "
            "number on each. Exclude as many ranks on every node, or use the policy 'global'."
        )
    inside = Layout(int(left[0]), 1, layout.slots_per_rank)
    per_node = num_experts // nodes
    try:
        inside.check_experts(per_node)
    except PlanInputError as error:
        raise PlanInputError(f"On each node: {error}") from error
    if len(layout.active) > 1 and layout.slots_per_rank > per_node:
        raise PlanInputError(
            f"{layout.slots_per_rank} slots on a rank are more than the {per_node} experts of its "
            f"node, so it would hold one twice; give `slots_per_rank` {per_node} or less, or use "
            "the policy 'global'."
        )
    return int(groups)


def keeps_groups(live: Longs, num_nodes: int, groups: int, num_experts: int) -> bool:
    """Return whether each group is on one node of a live map [L, R, S], and all have as many."""
    held = live.reshape(len(live), num_nodes, -1)
    group = np.where(held < 0, groups, held // (num_experts // groups))  # the last one: empty
    whole = np.zeros((len(live), num_nodes, groups + 1), bool)
    np.put_along_axis(whole, group, True, 2)
    on = whole[..., :-1]
    return bool((on.sum(2) == groups // num_nodes).all() and (on.sum(1) == 1).all())


def _list(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return shown + (", .." if len(numbers) > 6 else "")


def full(coming: Forecast, num_nodes: int, groups: int, num_ranks: int, slots: int) -> Longs:
    """Plan layers from nothing, [L, R, slots] int64."""
    of_groups = Forecast(
        _by_group(coming.scenarios, groups), coming.weights, _by_group(coming.demand, groups)
    )
    nodes = flat.full(of_groups, num_nodes, groups // num_nodes)
    experts = _experts_of(nodes, coming.demand.shape[1] // groups)
    parts = [
        flat.full(_part(coming, experts[:, node]), num_ranks // num_nodes, slots)
        for node in range(num_nodes)
    ]
    return _join(parts, experts)


def incremental(
    coming: Forecast, live: Longs, num_nodes: int, groups: int, budgets: Longs, min_gain: float
) -> Longs:
    """Improve the live map of layers [L, R, S] with at most so many moves in each, [L].

    The map keeps groups on nodes; see `flat.incremental` for the rest.
    """
    experts = _experts_on(live, num_nodes, groups, coming.demand.shape[1])
    per_node = live.shape[1] // num_nodes
    left = budgets.astype(np.int64)
    parts = []
    for node in range(num_nodes):
        inside = live[:, node * per_node : (node + 1) * per_node]
        pairs = zip(experts[:, node], inside, strict=True)
        local = np.stack([_local(known, ranks) for known, ranks in pairs])
        # what a node leaves over is for those behind it
        part = flat.incremental(
            _part(coming, experts[:, node]), local, left // (num_nodes - node), min_gain
        )
        moves = num_arrivals(part.reshape(len(live), -1), local.reshape(len(live), -1), per_node)
        left = np.maximum(left - moves, 0)
        parts.append(part)
    return _join(parts, experts)


def _local(experts: Longs, ranks: Longs) -> Longs:
    """Return a node's map [R, S] in the numbers of its own experts; empty slots stay -1."""
    return np.where(ranks < 0, -1, np.searchsorted(experts, ranks))


def _by_group(loads: Floats, groups: int) -> Floats:
    summed: Floats = loads.reshape(*loads.shape[:-1], groups, -1).sum(-1)
    return summed


def _experts_of(nodes: Longs, group_size: int) -> Longs:
    """Return the experts of each node, ascending, [L, N, E / N], of its groups [L, N, G / N]."""
    first = np.sort(nodes, -1)[..., None] * group_size
    return (first + np.arange(group_size)).reshape(*nodes.shape[:2], -1)


def _experts_on(live: Longs, num_nodes: int, groups: int, num_experts: int) -> Longs:
    """Return the experts that nodes hold, ascending, [L, N, E / N]."""
    group_size = num_experts // groups
    nodes = np.empty((len(live), num_nodes, groups // num_nodes), np.int64)
    for layer, ranks in enumerate(live):
        for node, held in enumerate(ranks.reshape(num_nodes, -1)):
            nodes[layer, node] = np.unique(held[held >= 0] // group_size)
    return _experts_of(nodes, group_size)


def _part(coming: Forecast, experts: Longs) -> Forecast:
    """Return the forecast of some experts of each layer, [L, E']."""
    return Forecast(
        np.take_along_axis(coming.scenarios, experts[:, None], 2),
        coming.weights,
        np.take_along_axis(coming.demand, experts, 1),
    )


def _join(parts: list[Longs], experts: Longs) -> Longs:
    """Return the map of all ranks, [L, R, S], of maps [L, R / N, S] in each node's own numbers."""
    layers = len(experts)
    known = [
        np.take_along_axis(experts[:, node], part.reshape(layers, -1), 1).reshape(part.shape)
        for node, part in enumerate(parts)
    ]
    return np.concatenate(known, 1)


def relabel(new: Longs, old: Longs, num_nodes: int) -> Longs:
    """Return the same plan of one layer [R, S] named as in the old one: nodes, ranks, slots."""
    ranks, slots = new.shape
    per_node = ranks // num_nodes
    overlap = flat.shared(new.reshape(num_nodes, -1), old.reshape(num_nodes, -1))
    _, to = linear_sum_assignment(overlap, maximize=True)
    found = np.empty_like(new).reshape(num_nodes, per_node, slots)
    parts, before = new.reshape(found.shape), old.reshape(found.shape)
    for node in range(num_nodes):
        found[to[node]] = flat.relabel(parts[node], before[to[node]])
    return found.reshape(new.shape)
