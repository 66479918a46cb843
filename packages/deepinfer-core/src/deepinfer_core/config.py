"""Options of the engine: one list, filled from a TOML file, then `DEEPINFER_*`, then flags."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deepinfer_core.errors import ConfigError

__all__ = ["ACCELERATORS", "ENV_PREFIX", "EngineConfig", "did_you_mean"]

ENV_PREFIX = "DEEPINFER_"

# The user's words for a backend -> its name in the entry-point group `deepinfer.kernels`.
ACCELERATORS = {"cpu": "cpu", "nvidia": "cuda", "cuda": "cuda", "ascend": "npu", "npu": "npu"}


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read true as 1
        raise ValueError("must be a number")
    return value


Count = Annotated[int, BeforeValidator(_not_bool), Field(ge=1)]
Size = Annotated[float, BeforeValidator(_not_bool), Field(gt=0, allow_inf_nan=False)]


class EngineConfig(BaseModel):
    """All options of the engine. A wrong value or an unknown name raises `ConfigError`.

    The title of a field is the group it stands under in `--help`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(
        None,
        title="Model",
        description="Model folder, or a hub id such as `owner/name`. Default: deepinfer-nano, a "
        "small model that comes with the package.",
        examples=["DIR|ID"],
    )
    accelerator: str | None = Field(
        None,
        title="Model",
        description="Kernel backend: cpu, nvidia or ascend. Default: the best that can run here.",
        examples=["cpu|nvidia|ascend"],
    )
    numerics: Literal["ideal", "cache", "release"] = Field(
        "release",
        title="Model",
        description="Rounding: ideal = float32, nothing rounded; cache = caches and index "
        "operands in their stored formats; release = bfloat16 and fp8 activations too.",
    )
    determinism: Literal["strict", "normal"] = Field(
        "normal",
        title="Model",
        description="Mode of requests that do not choose: strict = a result never depends on other "
        "requests, chunking or preemption; normal may replay and use faster kernels.",
    )
    num_threads: Count | None = Field(
        None,
        title="Model",
        description="Threads of the CPU backend, for the whole process. Default: 1 for a model "
        "whose matrices are too small to share among cores, else what torch chooses.",
    )
    seed: Annotated[int, BeforeValidator(_not_bool), Field(ge=0, lt=2**64)] = Field(
        0, title="Model", description="Seeds of requests that give none are derived from it."
    )
    block_size: Annotated[int, BeforeValidator(_not_bool), Field(ge=2)] = Field(
        64, title="Memory", description="Tokens of a cache block; even."
    )
    num_blocks: Count | None = Field(
        None, title="Memory", description="Blocks of each cache pool. Default: what memory allows."
    )
    cache_memory_gib: Size | None = Field(
        None, title="Memory", description="GiB for the block caches. Default: what memory allows."
    )
    max_sequences: Count = Field(
        16, title="Memory", description="Most sequences that run at a time; each has a cache slot."
    )
    max_model_len: Count | None = Field(
        None,
        title="Memory",
        description="Longest prompt plus output, in tokens. Default: the model's.",
    )
    stored_windows: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] = Field(
        0,
        title="Memory",
        description="Window states of prompts to keep; requests without encoder-side replay, such "
        "as strict ones, find prefixes in the cache only where one is kept.",
    )
    prefix_cache: bool = Field(
        True,
        title="Memory",
        description="Keep blocks of past requests, so that prompts with the same beginning start "
        "behind it.",
    )
    depth: Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=2)] = Field(
        2,
        title="Scheduling",
        description="Steps in flight: 2 = plan and launch a step while the one before runs; 1 = "
        "plan it when the one before is read, tell clients meanwhile; 0 = one thing at a time.",
    )
    step_budget_ms: Size | None = Field(
        None,
        title="Scheduling",
        description="Most milliseconds of a prefill step, by the model in `cost_model`. Default: "
        "`max_step_tokens` alone decides.",
    )
    cost_model: str | None = Field(
        None,
        title="Scheduling",
        description="File that `deepinfer bench startup --save` wrote: what prefill steps cost.",
        examples=["FILE"],
    )
    max_step_tokens: Count = Field(
        512,
        title="Scheduling",
        description="Most tokens computed in one step; a longer prompt takes several.",
    )
    prefill_run_max: Count = Field(
        2,
        title="Scheduling",
        description="Most prefill steps in a row while other sequences wait to decode.",
    )

    speculation: Literal["off", "fixed", "threshold", "delayed"] | None = Field(
        None,
        title="Speculation",
        description="Which drafts a step verifies: off = the model's drafter is not used; fixed = "
        "all; threshold = those likely enough; delayed = as many as pay by `speculation_costs`, "
        "all without it. Default: delayed if the model has a drafter and deepinfer-specdec is "
        "installed, else off.",
        examples=["off|fixed|threshold|delayed"],
    )
    num_drafts: Count | None = Field(
        None,
        title="Speculation",
        description="Drafts of a sequence in a step. Default: the model's block.",
    )
    speculation_threshold: Annotated[
        float, BeforeValidator(_not_bool), Field(gt=0, lt=1, allow_inf_nan=False)
    ] = Field(
        0.15,
        title="Speculation",
        description="Chance of survival from which on `threshold` verifies a draft.",
    )
    speculation_costs: str | None = Field(
        None,
        title="Speculation",
        description="File that `deepinfer bench speculation --save` wrote: what steps cost.",
        examples=["FILE"],
    )
    acceptance: Literal["target_noise", "rejection"] = Field(
        "target_noise",
        title="Speculation",
        description="Rule by which drafts stand: target_noise = texts are those of plain decoding; "
        "rejection = more drafts stand at temperatures above 0, texts are drawn from the same "
        "distribution and are others.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _explain(
        cls, data: Any, handler: ModelWrapValidatorHandler[EngineConfig], info: ValidationInfo
    ) -> EngineConfig:
        spelled: Mapping[str, str] = info.context or {}
        try:
            config = handler(data)
        except ValidationError as error:
            lines = [_sentence(cls, item, spelled) for item in error.errors()]
            raise ConfigError("\n".join(lines)) from None
        if config.num_blocks is not None and config.cache_memory_gib is not None:
            raise ConfigError(
                f"`num_blocks` is {config.num_blocks} and `cache_memory_gib` is "
                f"{config.cache_memory_gib:g}, but both set the size of the caches. Set one."
            )
        if config.stored_windows and not config.prefix_cache:
            raise ConfigError(
                f"`stored_windows` is {config.stored_windows}, but `prefix_cache` is false, so no "
                "window could be used. Leave one of them out."
            )
        if config.speculation_costs is not None and config.speculation not in (None, "delayed"):
            raise ConfigError(
                f"`speculation_costs` is {config.speculation_costs!r}, but `speculation` is "
                f"{config.speculation!r}, which does not look at costs. Leave one of them out."
            )
        if (config.step_budget_ms is None) != (config.cost_model is None):
            given, other = ("step_budget_ms", "cost_model")
            if config.step_budget_ms is None:
                given, other = other, given
            raise ConfigError(
                f"`{given}` is {getattr(config, given)!r}, but `{other}` is not set; a time budget "
                f"needs both. Set `{other}` too, or leave `{given}` out."
            )
        return config

    @field_validator("model")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must be a folder or a hub id")
        return value

    @field_validator("accelerator")
    @classmethod
    def _known_accelerator(cls, value: str | None) -> str | None:
        if value is not None and value not in ACCELERATORS:
            raise ValueError("must be 'cpu', 'nvidia' or 'ascend'")
        return value

    @field_validator("block_size")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even: an entry of a compressed cache covers two tokens")
        return value

    @classmethod
    def load(
        cls, file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
    ) -> EngineConfig:
        """Return the options of a file, an environment and flags; the later of them wins.

        Args:
            file: TOML file with option names as keys, or None.
            env: environment; only names that begin with `DEEPINFER_` are read.
            flags: options by name; None means not given.

        Raises:
            ConfigError: a name is unknown or a value is not allowed; names the place it came from.
        """
        values: dict[str, object] = {}
        spelled: dict[str, str] = {}
        known = list(cls.model_fields)
        for key, value in _read_toml(file).items():
            _known(key, known, f"`{key}` in {str(file)!r}")
            values[key], spelled[key] = value, f"`{key}` in {str(file)!r}"
        variables = [ENV_PREFIX + key.upper() for key in known]
        for name in sorted(env):
            if name.startswith(ENV_PREFIX):
                _known(name, variables, f"The environment variable `{name}`", ENV_PREFIX)
                key = known[variables.index(name)]
                values[key], spelled[key] = env[name], f"The environment variable `{name}`"
        for key, value in flags.items():
            _known(key, known, f"The option `{key}`")
            if value is not None:
                values[key], spelled[key] = value, f"`{key}`"
        return cls.model_validate(values, context=spelled)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a sentence with the nearest known name, or with all of them when none is near.

    Args:
        prefix: what all names begin with; it makes no two of them alike.
    """
    names = {each.removeprefix(prefix): each for each in known}
    near = difflib.get_close_matches(name.removeprefix(prefix), names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean `{names[near[0]]}`?"
    return "Known: " + ", ".join(f"`{each}`" for each in names.values()) + "."


def _known(name: str, names: list[str], spelled: str, prefix: str = "") -> None:
    if name not in names:
        raise ConfigError(f"{spelled} is unknown. {did_you_mean(name, names, prefix)}")


def _read_toml(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The options file {str(file)!r} cannot be read: {error.strerror}. Check its path."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The options file {str(file)!r} is not TOML: {error}. Write one `name = value` a line."
        ) from error


def _sentence(config: type[EngineConfig], item: Any, spelled: Mapping[str, str]) -> str:
    """Turn one fault that pydantic found into a sentence of ours."""
    name = ".".join(str(part) for part in item["loc"][:1])
    if item["type"] == "extra_forbidden":
        return f"The option `{name}` is unknown. {did_you_mean(name, config.model_fields)}"
    default = config.model_fields[name].default
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    allowed = message if message.startswith("must be") else f"must be {message}"
    unset = "" if default is None else f": the default is {default!r}"
    return (
        f"{spelled.get(name, f'`{name}`')} is {item['input']!r}, but it {allowed}. "
        f"Change it, or leave it out{unset}."
    )
