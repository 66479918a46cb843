"""Random histories of a scheduler, checked after every operation. A history is data: it replays.

python -m deepinfer_core.testing.scheduler_machine --operations 1000000 --seed 1
python -m deepinfer_core.testing.scheduler_machine --replay 1/37
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_core.testing.invariants import check, check_end, check_flushed
from deepinfer_core.testing.world import World
from deepinfer_core.testing.world_loop import LoopWorld
from deepinfer_core.testing.world_requests import WISHES, Wish
from deepinfer_core.testing.world_steps import StepWorld
from deepinfer_core.testing.world_watch import CONFIGS, TIERS, Config

__all__ = [
    "DISTURBANCES",
    "KINDS",
    "PARTS",
    "History",
    "Operation",
    "apply",
    "close",
    "draw_history",
    "replay",
]

PARTS = (
    "plan",
    "plan",
    "settle",
    "sample",
    "tell",
    "device",
    "scrub",
)  # of a step; `StepWorld` only
DISTURBANCES = (
    "refuse", "duplicate", "abort", "finish", "open_ticket", "complete", "tick", "squeeze",
    "evict", "flush", "pause", "poison", "fail_step", "fail_build",
)  # fmt: skip
END_LIMIT = 4000  # iterations in which all requests must end
KINDS = {"steps": StepWorld, "loop": LoopWorld}


@dataclass(frozen=True)
class Operation:
    """A method of `World` and two numbers that it draws from; for `submit` the wish instead."""

    name: str
    a: int = 0
    b: int = 0
    wish: Wish | None = None


@dataclass(frozen=True)
class History:
    """A world and what is done to it."""

    kind: str
    config: Config
    operations: tuple[Operation, ...]


def apply(world: World, operation: Operation) -> None:
    """Do one operation and check all invariants."""
    if operation.wish is not None:
        world.submit(operation.wish)
    elif operation.name == "run":
        world.run()
    else:
        getattr(world, operation.name)(operation.a, operation.b)
    world.num_operations += 1
    check(world)
    if operation.name == "flush":
        check_flushed(world)


def close(world: World) -> None:
    """Let all requests end, and check what is left."""
    world.calm()
    for _ in range(END_LIMIT):
        if not world.has_work:
            break
        apply(world, Operation("run"))
    assert not world.has_work, f"I22: {END_LIMIT} iterations do not end the work"
    apply(world, Operation("flush"))
    check_end(world)


def replay(history: History) -> int:
    """Run a history and let it end; returns the number of operations."""
    world = KINDS[history.kind](history.config)
    for operation in history.operations:
        apply(world, operation)
    close(world)
    return world.num_operations


def draw_history(seed: int, number: int, length: int = 120) -> History:
    """Return the history of that number in the series of a seed."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(("steps", "steps", "loop"))
    # budgets are a series of their own: all else of a history is the same without them
    tier = random.Random(f"budget {seed}/{number}").choice(TIERS)
    config = Config(**_choices(draw, CONFIGS), tier=tier)
    shares = {"submit": draw.choice((3, 6)), "run": 12, "disturb": draw.choice((0, 1, 4))}
    if kind == "steps":
        shares["part"] = draw.choice((0, 4, 12))
    names = ["submit"] * draw.randrange(6)
    names += draw.choices(list(shares), list(shares.values()), k=length)
    operations = []
    for name in names:
        a, b = draw.randrange(1000), draw.randrange(1000)
        wish = Wish(**_choices(draw, WISHES)) if name == "submit" else None
        which = {"disturb": draw.choice(DISTURBANCES), "part": draw.choice(PARTS)}
        operations.append(Operation(which.get(name, name), a, b, wish))
    return History(kind, config, tuple(operations))


def _choices(draw: random.Random, options: Any) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in options.items()}


def shrink(history: History) -> History:
    """Leave out operations as long as the history still fails, and at the same check."""
    size, fault = len(history.operations) // 2, _fault(history)
    while size:
        place = 0
        while place < len(history.operations):
            fewer = history.operations[:place] + history.operations[place + size :]
            candidate = History(history.kind, history.config, fewer)
            if _fault(candidate) == fault:
                history = candidate
            else:
                place += size
        size //= 2
    return history


def _fault(history: History) -> tuple[str, int] | None:
    """Return where a history fails: file and line of the check; None when it does not."""
    try:
        replay(history)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return place.filename, place.lineno or 0
    return None


def _run(seed: int, numbers: Iterable[int], wanted: int) -> int:
    begun, count, told = time.monotonic(), 0, 0
    for number in numbers:
        history = draw_history(seed, number)
        try:
            count += replay(history)
        except Exception:
            small = shrink(history)
            print(f"history {seed}/{number} fails; the shortest one that does:", flush=True)
            print(small.kind, small.config)
            print(*small.operations, sep="\n", flush=True)
            replay(small)
            raise
        if count >= wanted or count - told >= 10_000:
            told, done = count, f"{count} operations, {number + 1} histories"
            print(f"seed {seed}: {done}, {time.monotonic() - begun:.0f} s", flush=True)
        if count >= wanted:
            break
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """Run random histories, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000, help="stop after so many")
    parser.add_argument("--seed", type=int, default=1, help="of the series of histories")
    parser.add_argument("--replay", metavar="SEED/NUMBER", help="run one history alone")
    chosen = parser.parse_args(arguments)
    if chosen.replay:
        seed, number = map(int, chosen.replay.split("/"))
        _run(seed, [number], 1)
    else:
        _run(chosen.seed, range(10**9), chosen.operations)


if __name__ == "__main__":
    main()
