"""Tests with several processes. They need torch, an extra: without it they are left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

if find_spec("torch") is None:
    # `nox -s migration` has the extra; a package's own session installs none.
    collect_ignore_glob = ["test_*.py"]
else:
    # Processes that are started import their functions by name.
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def launch() -> Callable[..., list[Any]]:
    """See `migration_processes.launcher`."""
    import migration_processes

    return migration_processes.launcher()


@pytest.fixture
def on_ranks(launch: Callable[..., list[Any]], tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function on ranks: `on_ranks(function, num_ranks, *arguments)` returns its answers.

    It is called as `function(rank, num_ranks, folder, *arguments)`.
    """
    return lambda function, num_ranks, *arguments: launch(function, num_ranks, tmp_path, *arguments)
