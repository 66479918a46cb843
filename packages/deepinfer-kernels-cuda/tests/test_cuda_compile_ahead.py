"""Every kernel compiles to machine code for Hopper and Blackwell, without either being there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_kernels_cuda.testing.aot import MAX_SHARED_BYTES, TARGETS

HERE = Path(__file__).parent
FAMILIES = sorted(path.stem.removeprefix("aot_") for path in HERE.glob("aot_*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_for_every_target(family, tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_ahead.py"), family],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, "no cases"
    assert [line for line in lines if line["error"]] == []
    assert max(line["shared"] for line in lines) <= MAX_SHARED_BYTES
    assert {line["capability"] for line in lines} == set(TARGETS)
