"""What all benchmarks here report beside their figures. The scripts import it from their folder."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ["facts"]


def facts(peer_version: str | None) -> dict[str, object]:
    """Return where and with what something was measured."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "pydantic": version("pydantic"),
        "tokenizers": version("tokenizers"),
        "peer": peer_version,
        "command": " ".join(sys.argv),
    }
