"""Reading `config.json`: which keys are fields, which are harmless, which have one value only.

Nothing in a model's configuration is skipped in silence: a key that is neither a field of the
dataclass being filled nor in one of the two tables below might change the model's arithmetic,
so it is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from deepinfer_core.errors import ConfigError, shown

__all__ = [
    "HARMLESS_KEYS",
    "check_keys",
    "check_quantization",
    "fail",
    "read_fields",
    "read_json",
    "read_tables",
]

# Keys that say nothing about the forward pass: provenance, training, or another library's switches.
HARMLESS_KEYS = frozenset(
    {
        "_name_or_path",  # where it was saved from
        "architectures",  # `model_type` decides
        "auto_map",  # remote code; never run here
        "dtype",  # every tensor's own dtype is in its file
        "initializer_range",  # training
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Keys with one supported value. Absent means that value.
_FIXED_VALUES: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}

# The stored formats: 32x32 FP8 tiles with power-of-two scales, FP4 experts. All keys are needed,
# because what other software assumes for an absent one differs from the release.
_QUANTIZATION: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
# The same formats in other words; may be absent.
_QUANTIZATION_OPTIONAL: dict[str, object] = {"fmt": "e4m3"}
# A list of matrices left unquantised; the files say so themselves and are checked one by one.
_QUANTIZATION_HARMLESS = frozenset({"modules_to_not_convert"})

# Field names of the release's other file, `inference/config.json`. Seeing one means a mix-up.
_INFERENCE_NAMES = frozenset(
    {
        "dim",
        "expert_dtype",
        "moe_inter_dim",
        "n_activated_experts",
        "n_heads",
        "n_layers",
        "n_mtp_layers",
        "norm_eps",
        "rope_factor",
        "rope_head_dim",
        "route_scale",
        "score_func",
        "window_size",
    }
)


def fail(key: str, value: object, allowed: str) -> ConfigError:
    """Return the error for one field: which key, which value, what is allowed."""
    return ConfigError(f"`{key}` in config.json is {shown(value)}: {allowed}.")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is absent, unreadable, not JSON or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"`{path}` does not exist. A model folder holds config.json, tokenizer.json and "
            f"*.safetensors; check the path, or finish the download."
        ) from error
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(
            f"`{path}` is not valid JSON ({error}). It may be half written; fetch it again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"`{path}` holds a {type(content).__name__}, not a JSON object.")
    return content


def read_tables(config: Mapping[str, Any], nested: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """Return the nested tables of a configuration; an absent or null one is left out.

    Args:
        config: the whole of config.json.
        nested: names of the tables.
    Raises:
        ConfigError: a table is not an object, or the file is the release's other config.
    """
    if strangers := sorted(_INFERENCE_NAMES & config.keys()):
        raise ConfigError(
            f"config.json has the key `{strangers[0]}`, a name of the release's "
            f"`inference/config.json`, which is not supported. Use the config.json at the top of "
            f"the model folder: it has `text_config` with names such as `hidden_size`."
        )
    tables: dict[str, Mapping[str, Any]] = {}
    for name in nested:
        table = config.get(name)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise fail(name, table, "must be an object")
        tables[name] = table
    return tables


def check_quantization(table: Mapping[str, Any]) -> None:
    """Check that `quantization_config` describes the one supported set of stored formats.

    Raises:
        ConfigError: a key is unknown, absent, or has another value.
    """
    where = "quantization_config"
    known = _QUANTIZATION | _QUANTIZATION_OPTIONAL
    _check_unknown(table, where, known.keys() | _QUANTIZATION_HARMLESS)
    for key, wanted in known.items():
        if key not in table and key in _QUANTIZATION_OPTIONAL:
            continue
        if table.get(key) != wanted:
            value = f"{table[key]!r}" if key in table else "absent"
            raise ConfigError(f"`{where}.{key}` in config.json is {value}: must be {wanted!r}.")


def check_keys(
    table: Mapping[str, Any],
    where: str,
    known: Set[str],
    fixed: Mapping[str, object] | None = None,
) -> None:
    """Check that a table holds known keys only, and that keys with one supported value have it.

    Args:
        table: the table.
        where: its name, for messages; empty for the top level.
        known: keys whose values the caller reads.
        fixed: keys with one supported value, beside the common ones.
    Raises:
        ConfigError: a key is unknown, or a value is not the supported one.
    """
    fixed = {**_FIXED_VALUES, **(fixed or {})}
    _check_unknown(table, where, known | fixed.keys() | HARMLESS_KEYS)
    for key, wanted in fixed.items():
        if key in table and not _same(table[key], wanted):
            key_path = f"{where}.{key}" if where else key
            raise fail(key_path, table[key], f"only {wanted!r} is supported")


def read_fields(
    cls: type,
    table: Mapping[str, Any],
    where: str,
    *,
    fixed: Mapping[str, object] | None = None,
    derived: Collection[str] = (),
    optional: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the values of a dataclass's fields, taken from one table of config.json.

    Args:
        cls: a dataclass whose annotations are `int`, `float`, `str`, `tuple[int, ...]` or one of
            these with `| None`; names are those of the file.
        table: the table.
        where: its name, for messages.
        fixed: keys with one supported value, beside the common ones.
        derived: fields that the caller fills; the table may not hold them.
        optional: fields that may be absent or null, with their defaults.
    Raises:
        ConfigError: a key is unknown, a field is absent, or a value has the wrong type.
    """
    optional = optional or {}
    fields = {f.name: str(f.type) for f in dataclasses.fields(cls) if f.name not in derived}
    check_keys(table, where, fields.keys(), fixed)
    values: dict[str, Any] = {}
    for name, kind in fields.items():
        value = table.get(name)
        if value is not None:
            values[name] = _convert(f"{where}.{name}", kind.removesuffix(" | None"), value)
        elif name in optional:
            values[name] = optional[name]
        elif kind.endswith("None"):
            values[name] = None
        else:
            problem = "null" if name in table else "absent"
            raise ConfigError(f"`{where}.{name}` in config.json is {problem}, but it is needed.")
    return values


def _same(value: object, wanted: object) -> bool:
    # JSON's `0.0` and `0` are one number, but `false` is not a number
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _check_unknown(table: Mapping[str, Any], where: str, known: Set[str]) -> None:
    unknown = [key for key in table if key not in known]
    if not unknown:
        return
    place = f"`{where}` of config.json" if where else "the top level of config.json"
    described = []
    for key in unknown:
        near = difflib.get_close_matches(key, known, n=1)
        described.append(f"`{key}`" + (f" (nearest known name: `{near[0]}`)" if near else ""))
    raise ConfigError(
        f"Unknown in {place}: {', '.join(described)}. A key that is not understood could change "
        f"the model's arithmetic, so it is not skipped; correct the name or remove the key."
    )


def _convert(key: str, kind: str, value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "int" and number and isinstance(value, int):
        return value
    if kind == "float" and isinstance(value, int | float) and number:
        if abs(value) <= sys.float_info.max:
            return float(value)
        raise fail(key, value, "must be a finite number")
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "tuple[int, ...]" and isinstance(value, list | tuple):
        return tuple(_convert(f"{key}[{i}]", "int", item) for i, item in enumerate(value))
    wanted = {"int": "an integer", "float": "a number", "str": "a string"}
    raise fail(key, value, f"must be {wanted.get(kind, 'a list of integers')}")
