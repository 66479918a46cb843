"""Tokens in flight: what launched steps may have computed and the host has not settled."""

from __future__ import annotations

from deepinfer_core.cache.block_pool import Owner

__all__ = ["InflightLedger"]


class InflightLedger:
    """Reservations by (uid, generation) and step."""

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self.total_inflight_tokens = 0
        self._steps: dict[int, dict[Owner, int]] = {}

    def reserve(self, step_seq: int, owner: Owner, num_tokens: int) -> None:
        """Book the tokens a step feeds for one sequence."""
        rows = self._steps.setdefault(step_seq, {})
        assert owner not in rows and num_tokens > 0, f"{owner} is twice in step {step_seq}"
        rows[owner] = num_tokens
        self.total_inflight_tokens += num_tokens

    def settle(self, step_seq: int, owner: Owner) -> int:
        """Remove and return what was reserved; the step is forgotten with its last sequence."""
        rows = self._steps[step_seq]
        num_tokens = rows.pop(owner)
        if not rows:
            del self._steps[step_seq]
        self.total_inflight_tokens -= num_tokens
        return num_tokens

    def inflight(self) -> dict[Owner, int]:
        """Return the tokens in flight of each owner. Walks the ledger: for audits."""
        found: dict[Owner, int] = {}
        for rows in self._steps.values():
            for owner, num_tokens in rows.items():
                found[owner] = found.get(owner, 0) + num_tokens
        return found
