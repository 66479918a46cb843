"""Host buffers with fixed addresses, a ring slot for each step that may be in flight.

A launch copies the plan into its slot; the device reads the slot, as a captured graph does. A slot
whose step is through is poisoned at once, and so are the results of the slot's last step when a
launch takes it: whoever still reads either reads rubbish.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.plans import StepPlan, StepResult, StepRows, TableDelta

__all__ = ["POISON", "InputRing", "InputSlot", "result_arrays"]

POISON = -(2**40)  # no id, position or length looks like this


@dataclass(eq=False)
class InputSlot:
    """Buffers of one step; arrays by name, larger than what is in them. The rest is poisoned."""

    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    step_seq: int | None = None  # whose input is in it; None when it is free
    used: list[np.ndarray] = field(default_factory=list)  # the parts of buffers with input in them
    results: list[np.ndarray] = field(default_factory=list)

    def release(self) -> None:
        """Poison the input: the step is through."""
        self.step_seq = None
        for part in self.used:
            part.fill(POISON)
        self.used.clear()


def _arrays(plan: StepPlan) -> dict[str, np.ndarray]:
    """Return the arrays of a plan by name."""
    found = {"rows": plan.rows.data, "token_ids": plan.token_ids}
    for pool, delta in plan.tables.items():
        for name in ("slots", "places", "block_ids"):
            found[f"{pool}.{name}"] = getattr(delta, name)
    return found


class InputRing:
    """Slots taken in turn."""

    def __init__(self, num_slots: int) -> None:
        """Make slots without buffers; they grow with the largest step seen."""
        self.slots = [InputSlot() for _ in range(num_slots)]
        self.num_allocations = 0
        self._next = 0
        self._capacity: dict[str, int] = {}

    def take(self, plan: StepPlan) -> tuple[InputSlot, StepPlan]:
        """Copy a plan into the next slot; returns the slot and the plan as the device sees it.

        Raises:
            AssertionError: the step that used the slot is not through.
        """
        slot = self.slots[self._next % len(self.slots)]
        assert slot.step_seq is None, (
            f"step {plan.output.step_seq} takes the ring slot of step {slot.step_seq}, "
            f"which is still on the device"
        )
        self._next += 1
        slot.step_seq = plan.output.step_seq
        for array in slot.results:
            array.fill(np.nan if array.dtype.kind == "f" else POISON)
        slot.results.clear()
        held = {name: self._copy(slot, name, array) for name, array in _arrays(plan).items()}
        tables = {
            pool: TableDelta(*(held[f"{pool}.{name}"] for name in ("slots", "places", "block_ids")))
            for pool in plan.tables
        }
        rows, extras = StepRows(held["rows"][:]), dict(plan.extras)  # a view: it gets frozen
        return slot, StepPlan(plan.output, rows, held["token_ids"], extras, tables)

    def _copy(self, slot: InputSlot, name: str, array: np.ndarray) -> np.ndarray:
        size = array.shape[-1]
        wanted = (*array.shape[:-1], self.reserve(name, size))
        if name not in slot.buffers or slot.buffers[name].shape != wanted:
            slot.buffers[name] = np.full(wanted, POISON, dtype=np.int64)
        held = slot.buffers[name][..., :size]
        held[...] = array
        slot.used.append(held)
        return held

    def reserve(self, name: str, size: int) -> int:
        """Return the capacity of a buffer, which grows when `size` items do not fit."""
        if size > self._capacity.get(name, 0):
            self._capacity[name] = 1 << (size - 1).bit_length()
            self.num_allocations += 1
        return self._capacity.get(name, 0)

    @staticmethod
    def check_frozen(plan: StepPlan, held: StepPlan) -> None:
        """Compare a plan with what its slot got at the launch.

        Raises:
            AssertionError: the host changed it.
        """
        taken = _arrays(held)
        changed = [n for n, array in _arrays(plan).items() if not np.array_equal(array, taken[n])]
        if dict(plan.extras) != held.extras:
            changed.append("extras")
        assert not changed, (
            f"input of step {plan.output.step_seq} changed after its launch: {', '.join(changed)}"
        )


def result_arrays(result: StepResult) -> list[np.ndarray]:
    """Return the arrays of a result, which lie in the step's slot."""
    found = [result.token_ids, result.num_tokens, result.status, result.start]
    found += [result.num_verified]
    found += [] if result.drafts is None else [result.drafts]
    found += [] if result.survival is None else [result.survival]
    if (slab := result.logprobs) is not None:
        found += [slab.rows, slab.num_top, slab.chosen, slab.best_ids, slab.best]
    return found
