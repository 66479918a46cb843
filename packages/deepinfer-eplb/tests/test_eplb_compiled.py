"""Compiled functions: where nothing can be kept, and what the cache would not notice."""

import importlib
import pkgutil
import types

import numba
import numpy as np
import pytest

import deepinfer_eplb
from deepinfer_eplb.compiled import compiled


def test_a_function_without_a_place_for_its_cache_is_compiled_all_the_same() -> None:
    # Source that is in no file is to numba what a folder that cannot be written is.
    names: dict[str, types.FunctionType] = {}
    exec(compile("def total(x):\n    return x.sum()", "nowhere", "exec"), names)
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(names["total"])
    assert compiled(names["total"])(np.arange(5.0)) == 10


def test_no_compiled_function_calls_one_of_another_module() -> None:
    found = 0
    for module in pkgutil.walk_packages(deepinfer_eplb.__path__, "deepinfer_eplb."):
        if module.name.rpartition(".")[2] == "__main__" or ".migrate" in module.name:
            continue  # it would run; it needs torch
        names = vars(importlib.import_module(module.name))
        for function in names.values():
            if getattr(function, "__module__", "") != module.name:
                continue
            if not hasattr(function, "py_func"):
                continue
            found += 1
            for name in function.py_func.__code__.co_names:
                used = names.get(name)
                if hasattr(used, "py_func"):
                    assert used.__module__ == module.name, f"{function.__name__} calls {name}"
    assert found > 10
