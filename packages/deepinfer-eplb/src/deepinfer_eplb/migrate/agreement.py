"""How ranks agree: one vote a step, and a comparison before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from deepinfer_eplb.errors import PlanInputError, SettingError

__all__ = ["Agree", "Members", "Vote", "check_timeout", "vote_over"]

_LONGEST = 1e6  # seconds: more than eleven days is no limit, and may not fit where it is kept


class Vote(IntEnum):
    """What a rank says about the layer being staged. The group's decision is the least of all."""

    FAULT = 0
    ABORT = 1
    WAIT = 2
    READY = 3


Agree = Callable[[Vote], int]


def vote_over(group: dist.ProcessGroup, timeout_seconds: float = 60.0) -> Agree:
    """Return an agreement by one all-reduce of four bytes over a gloo group, on the host.

    Args:
        group: for host memory, with a member for every rank of the migration.
        timeout_seconds: after so long without an answer the vote has failed.
    Raises:
        SettingError: `timeout_seconds` is not above 0, or above 10^6.
    """
    check_timeout(timeout_seconds)

    def agree(vote: Vote) -> int:
        least = torch.tensor([int(vote)], dtype=torch.int32)
        work = dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group, async_op=True)
        work.wait(timedelta(seconds=timeout_seconds))
        return int(least)

    return agree


def check_timeout(timeout_seconds: float) -> None:
    """Refuse a limit that is none.

    Raises:
        SettingError: it is not above 0, or above 10^6.
    """
    if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds <= _LONGEST:
        raise SettingError(
            f"`timeout_seconds` is {timeout_seconds!r}; allowed: numbers above 0, up to "
            f"{_LONGEST:g}."
        )


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a migration.

    Attributes:
        group: that carries the experts.
        ranks: the layout's rank of each member.
        device: where the experts are.
        timeout_seconds: for `gather` on a CPU.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device
    timeout_seconds: float

    @property
    def rank(self) -> int:
        """This process's rank of the layout."""
        return self.ranks[self.group.rank()]

    def check(self, num_ranks: int) -> None:
        """Refuse ranks that are not one for each member.

        Raises:
            PlanInputError: too many or few, one twice, or one outside the layout.
        """
        known = sorted(set(self.ranks) & set(range(num_ranks)))
        if known != sorted(self.ranks) or len(self.ranks) != self.group.size():
            raise PlanInputError(
                f"`ranks` is {list(self.ranks)} for a group of {self.group.size()}; needed: for "
                f"each member another one of the layout's ranks, 0 to {num_ranks - 1}."
            )

    def others(self, num_ranks: int) -> list[int]:
        """Return the layout's ranks that take no part."""
        return sorted(set(range(num_ranks)) - set(self.ranks))

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return what every member gives, in their order. Every member calls it.

        Raises:
            RuntimeError: of torch, if a member failed or is late.
        """
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        said = [torch.empty_like(mine) for _ in self.ranks]
        work = dist.all_gather(said, mine, group=self.group, async_op=True)
        if self.device.type == "cpu":
            work.wait(timedelta(seconds=self.timeout_seconds))
        else:
            work.wait()  # the group's own limit holds
        return [[int(value) for value in each.tolist()] for each in said]
