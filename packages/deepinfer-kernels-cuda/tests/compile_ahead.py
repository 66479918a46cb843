"""Compile every kernel for every target; prints one JSON line a case.

A program of its own: the interpreter of the tests beside it must be off when kernels are decorated.
Each `aot_<family>.py` beside this file lists its cases as `CASES`.
"""

import importlib.util
import json
import sys
from pathlib import Path

from deepinfer_kernels_cuda.testing.aot import TARGETS, compile_case


def main(families: list[str]) -> None:
    for path in sorted(Path(__file__).parent.glob("aot_*.py")):
        if families and path.stem.removeprefix("aot_") not in families:
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in module.CASES:
            for capability in TARGETS:
                line = {"case": case.name, "capability": capability, "error": None, "shared": 0}
                try:
                    line["shared"] = compile_case(case, capability)
                except Exception as error:  # told to the test, which fails with it
                    line["error"] = f"{type(error).__name__}: {error}"[:2000]
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
