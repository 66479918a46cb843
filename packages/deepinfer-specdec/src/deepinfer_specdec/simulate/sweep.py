"""Policies against one another over a range of loads, all on the same traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.simulate.acceptance import Trace, Traffic, draw
from deepinfer_specdec.simulate.measured import MeasuredPoint
from deepinfer_specdec.simulate.policies import check_policy, make_policy
from deepinfer_specdec.simulate.serving import OperatingPoint, Outcome, simulate

__all__ = ["DEFAULT_LOADS", "DEFAULT_POLICIES", "Line", "Sweep", "sweep"]

DEFAULT_LOADS = (1, 4, 16, 32, 60, 120, 240)
DEFAULT_POLICIES = (
    "off",
    "fixed-3",
    "fixed-5",
    "threshold-0.15",
    "group-threshold-0.15",
    "algorithm-1",
    "algorithm-1-smooth",
    "delayed",
    "own-k",
    "group-k",
)
# One and the same choice; what differs is whether a rank waits for the others.
_CHOICE_OF = {"delayed": "own-k"}


@dataclass(frozen=True)
class Line:
    """One policy at one load. Ratios are of tokens per second, 1.0 is the same.

    Attributes:
        requests: of a rank.
        policy: its name.
        verified: mean drafts verified for a request in a step.
        accepted_len: mean tokens of a request and step, with the one after the drafts.
        alone_to_fixed, alone_to_off: on a rank that waits for nobody, against all drafts and
            against none; None for a policy that is about groups.
        group_to_fixed, group_to_off: in the group; None for `delayed`, which is `own-k` there.
        full: share of steps that verify all drafts.
        padding: share of the rows that is padding.
    """

    requests: int
    policy: str
    verified: float
    accepted_len: float
    alone_to_fixed: float | None
    alone_to_off: float | None
    group_to_fixed: float | None
    group_to_off: float | None
    full: float
    padding: float


@dataclass(frozen=True)
class Sweep:
    """What is compared.

    Attributes:
        loads: requests of a rank, each at least 1.
        policies: names, see `policies`.
        ranks: of the group; figures of one rank are means over as many lone ranks.
        steps: of each run, at least 3.
        seed: of the traffic; results are a function of it and the other values.
        traffic, point: what requests are like and what steps cost.
    """

    loads: tuple[int, ...] = DEFAULT_LOADS
    policies: tuple[str, ...] = DEFAULT_POLICIES
    ranks: int = 64
    steps: int = 200
    seed: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    point: OperatingPoint | MeasuredPoint = field(default_factory=OperatingPoint)

    def __post_init__(self) -> None:
        """Refuse values that cannot be run.

        Raises:
            SettingError: a count is too small, a policy is unknown, or traffic and operating point
                have blocks of different sizes.
        """
        if not self.loads or min(self.loads) < 1:
            raise SettingError(f"`loads` are {self.loads!r}; give counts of requests, 1 or more.")
        for requests in self.loads:
            self.point.check_load(requests)
        for name, least in (("ranks", 1), ("steps", 3), ("seed", 0)):
            if getattr(self, name) < least:
                raise SettingError(
                    f"`{name}` is {getattr(self, name)!r}; it must be {least} or more."
                )
        if not self.policies:
            raise SettingError("`policies` is empty; name one or more.")
        for policy in self.policies:
            check_policy(policy, self.traffic.num_drafts)
        if self.point.num_drafts != self.traffic.num_drafts:
            raise SettingError(
                f"The operating point has {self.point.num_drafts} drafts a block, the traffic "
                f"{self.traffic.num_drafts}. Give both the same `num_drafts`."
            )


def sweep(asked: Sweep, progress: Callable[[Line], None] | None = None) -> list[Line]:
    """Run all policies at all loads.

    Args:
        asked: what to compare.
        progress: called with each line as soon as it is there.
    """
    lines = []
    for requests in asked.loads:
        rows = [requests] * asked.ranks
        trace = draw(asked.traffic, rows, asked.steps, _seed(asked.seed, requests))
        for line in _lines(asked, requests, trace):
            lines.append(line)
            if progress is not None:
                progress(line)
    return lines


def _seed(seed: int, requests: int) -> int:
    """A load's traffic does not depend on which other loads are asked for."""
    return seed * 1_000_003 + requests


def _lines(asked: Sweep, requests: int, trace: Trace) -> list[Line]:
    drafts = asked.traffic.num_drafts
    costs = asked.point.costs(requests * (1 + drafts))
    found: dict[str, Outcome] = {}

    def outcome(policy: str) -> Outcome:
        name = _CHOICE_OF.get(policy, policy)
        if name not in found:
            chosen = make_policy(name, costs, asked.ranks, drafts)
            found[name] = simulate(trace, chosen, asked.point)
        return found[name]

    full, off = outcome(f"fixed-{drafts}"), outcome("off")
    lines = []
    for policy in asked.policies:
        it = outcome(policy)
        line = Line(
            requests=requests,
            policy=policy,
            verified=it.verified,
            accepted_len=it.accepted_len,
            alone_to_fixed=it.alone / full.alone,
            alone_to_off=it.alone / off.alone,
            group_to_fixed=it.group / full.group,
            group_to_off=it.group / off.group,
            full=it.full,
            padding=it.padding,
        )
        if policy == "own-k" or policy.startswith("group-"):
            line = replace(line, alone_to_fixed=None, alone_to_off=None)
        if policy == "delayed":
            line = replace(line, group_to_fixed=None, group_to_off=None)
        lines.append(line)
    return lines
