"""How every benchmark reports: a table for people, one JSON line for machines."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deepinfer_core.errors import OutputError

__all__ = ["check_writable", "device_name", "print_table", "report"]


def device_name() -> str:
    """Return the name of the device that benchmarks run on."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header; the first column is left-aligned, the others right-aligned."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join((line[0].ljust(len(first)), *rest)))


def check_writable(path: Path | None) -> None:
    """Raise `OutputError` unless a file can be written, before what goes there is measured."""
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK) or not place.exists():
        raise OutputError(
            f"`{path}` cannot be written. Choose a file in a folder that exists and is writable."
        )


def report(name: str, figures: Mapping[str, object], out: Path | None) -> None:
    """Print one JSON line with the figures, device, versions and command; append it to `out`."""
    line = json.dumps(
        {
            "benchmark": name,
            **figures,
            "device": device_name(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "command": shlex.join(["python", *sys.argv]),
        }
    )
    print(line)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
