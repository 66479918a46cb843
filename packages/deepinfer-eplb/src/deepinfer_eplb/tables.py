"""Text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_eplb.maps import Layout

__all__ = ["aligned", "size", "words_of"]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as lines, their columns aligned; an empty row is an empty line.

    Args:
        rows: cells, of each row that is not empty the same number.
        left: so many columns are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*filter(None, rows), strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(num_bytes: int) -> str:
    """Return a number of bytes with its unit; `-` for none."""
    if not num_bytes:
        return "-"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def words_of(layout: Layout) -> str:
    """Return ranks, nodes and slots in words."""
    nodes = f"{layout.num_nodes} node{'s' * (layout.num_nodes > 1)}"
    return f"{layout.num_ranks} ranks on {nodes} x {layout.slots_per_rank} slots"
