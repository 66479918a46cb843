"""Any interleaving of requests, late results, transfers, faults and short memory keeps the books.

Every operation is followed by the invariants of `testing/invariants.py`; at the end everything is
let finish and compared with the serial reference. Longer runs, and histories by number:
`python -m deepinfer_core.testing.scheduler_machine`.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer_core.testing.scheduler_machine import (
    DISTURBANCES,
    KINDS,
    PARTS,
    History,
    Operation,
    apply,
    close,
    replay,
)
from deepinfer_core.testing.world_requests import WISHES, Wish
from deepinfer_core.testing.world_watch import CONFIGS, TIERS, Config

ENOUGH = 10_000  # operations of each machine
SETTINGS = settings(
    max_examples=110,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
NUMBERS = st.integers(0, 999)


def choices(of: type, options: dict[str, tuple[object, ...]]) -> st.SearchStrategy:
    return st.builds(of, **{name: st.sampled_from(values) for name, values in options.items()})


class SchedulerMachine(RuleBasedStateMachine):
    """Histories of one kind of world; `count` adds up their operations."""

    kind = "steps"
    count = 0

    @initialize(config=choices(Config, {**CONFIGS, "tier": TIERS}))
    def start(self, config: Config) -> None:
        self.world = KINDS[self.kind](config)

    @rule(wish=choices(Wish, WISHES))
    def submit(self, wish: Wish) -> None:
        apply(self.world, Operation("submit", wish=wish))

    @rule(times=st.integers(1, 5))
    def run(self, times: int) -> None:
        for _ in range(times):
            apply(self.world, Operation("run"))

    @precondition(lambda self: self.kind == "steps")
    @rule(name=st.sampled_from(PARTS), a=NUMBERS, b=NUMBERS)
    def part(self, name: str, a: int, b: int) -> None:
        apply(self.world, Operation(name, a, b))

    @rule(name=st.sampled_from(DISTURBANCES), a=NUMBERS, b=NUMBERS)
    def disturb(self, name: str, a: int, b: int) -> None:
        apply(self.world, Operation(name, a, b))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            close(self.world)
            type(self).count += self.world.num_operations


def submit(**fields: object) -> Operation:
    return Operation("submit", wish=Wish(**fields))


def once_failed() -> dict[str, History]:
    """Return shrunk histories of faults that were found."""
    small = {"blocks": 9, "block_size": 2}
    run = Operation("run")
    first = submit(length=7, cap=5, drafts=1, priority=1, mode="both")
    ends = submit(length=8, cap=13, drafts=1, stops=9, grammar=3, prompt_logprobs=0)
    refuses = submit(length=6, family=1, cap=8, grammar=6, fault="refuse")
    kept = submit(length=2, cap=8, mode="decoder", use_cache=False)
    long = submit(length=5, family=1, cap=25)
    transfer = (Operation("open_ticket"), Operation("tick", a=50))
    error = (Operation("fail_build", b=6), run, run, run)
    return {
        "stop id in the run that ends a grammar": History(
            "loop", Config(**small, drafts=3, depth=0), (first, ends)
        ),
        "token that its grammar refuses": History("steps", Config(**small, drafts=3), (refuses,)),
        "peer of a running request that cannot be shut out": History(
            "loop", Config(**small, slots=1), (kept, run, *transfer)
        ),
        "drafts that alone do not fit": History(
            "steps", Config(blocks=6, block_size=2, drafts=7), (submit(length=5, cap=25),)
        ),
        "published copies of blocks that it has too": History(
            "steps",
            Config(blocks=5, block_size=2, chunk=3, budget=4),
            (
                submit(length=6, cap=2, mode="both"),
                run,
                submit(length=8, cap=5, priority=2, mode="decoder"),
            ),
        ),
        "copies that are published again and again": History(
            "steps",
            Config(blocks=6, block_size=2, chunk=2, budget=9, drafts=3),
            (
                submit(length=3, cap=8, drafts=0, priority=1, mode="both"),
                run,
                submit(length=10, cap=3, drafts=0, priority=2),
            ),
        ),
        "error of ours while results are not told": History(
            "loop", Config(**small), (long, *[run] * 5, *error)
        ),
    }


@pytest.mark.parametrize("history", once_failed().values(), ids=once_failed())
def test_history_that_once_failed(history):
    replay(history)


@pytest.mark.parametrize("kind", KINDS)
def test_any_history_keeps_every_invariant(kind):
    machine = type("Machine", (SchedulerMachine,), {"kind": kind, "count": 0})
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert machine.count >= ENOUGH, f"{machine.count} operations are too few to mean much"
