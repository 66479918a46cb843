"""Options of the engine: sources, their order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from deepinfer_core.config import EngineConfig, did_you_mean
from deepinfer_core.errors import ConfigError


@pytest.fixture
def options_file(tmp_path: Path) -> Path:
    file = tmp_path / "options.toml"
    file.write_text('block_size = 32\nmax_sequences = 4\nnumerics = "cache"\n')
    return file


def test_environment_wins_over_file_and_flags_win_over_both(options_file: Path) -> None:
    env = {"DEEPINFER_MAX_SEQUENCES": "5", "DEEPINFER_NUMERICS": "ideal", "HOME": "/root"}
    config = EngineConfig.load(options_file, env, {"numerics": "release", "num_blocks": None})
    assert (config.block_size, config.max_sequences, config.numerics) == (32, 5, "release")


@pytest.mark.parametrize("word", ["cpu", "nvidia", "cuda", "ascend", "npu"])
def test_accelerator_stays_as_it_was_typed(word: str) -> None:
    assert EngineConfig.load(None, {"DEEPINFER_ACCELERATOR": word}, {}).accelerator == word


def test_unknown_key_of_the_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("block_sise = 64\n")
    with pytest.raises(ConfigError, match=r"`block_sise` in .*options.toml.*mean `block_size`"):
        EngineConfig.load(file, {}, {})


def test_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"`DEEPINFER_NUMERIC`.*mean `DEEPINFER_NUMERICS`"):
        EngineConfig.load(None, {"DEEPINFER_NUMERIC": "ideal"}, {})


def test_the_prefix_of_variables_makes_no_two_of_them_alike() -> None:
    with pytest.raises(ConfigError, match=r"`DEEPINFER_FOO` is unknown. Known: `DEEPINFER_MODEL`,"):
        EngineConfig.load(None, {"DEEPINFER_FOO": "1"}, {})


@pytest.mark.parametrize("make", [lambda **o: EngineConfig.load(None, {}, o), EngineConfig])
def test_unknown_keyword_is_refused_with_the_nearest_name(make: type[EngineConfig]) -> None:
    with pytest.raises(ConfigError, match=r"`max_seqs` is unknown.*mean `max_sequences`"):
        make(max_seqs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("block_size", 63, "even"),
        ("block_size", 0, "2"),
        ("block_size", True, "number"),
        ("block_size", "many", "integer"),
        ("numerics", "exact", "'ideal', 'cache' or 'release'"),
        ("determinism", "loose", "'strict' or 'normal'"),
        ("accelerator", "tpu", "'cpu', 'nvidia' or 'ascend'"),
        ("num_blocks", 0, "1"),
        ("cache_memory_gib", 0, "0"),
        ("cache_memory_gib", float("inf"), "finite"),
        ("max_sequences", 1.5, "integer"),
        ("max_model_len", -1, "1"),
        ("max_step_tokens", 0, "1"),
        ("prefill_run_max", 0, "1"),
        ("seed", 2**64, "18446744073709551616"),
        ("seed", -1, "0"),
        ("model", " ", "folder"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(None, {}, {name: value})
    message = str(caught.value)
    assert message.startswith(f"`{name}` is {value!r}, but it must be ")
    assert allowed in message
    assert "Change it" in message


def test_wrong_values_of_all_sources_are_listed_together(options_file: Path) -> None:
    options_file.write_text("block_size = 3\n")
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(options_file, {"DEEPINFER_SEED": "x"}, {"numerics": "y"})
    seed, *_ = [line for line in str(caught.value).splitlines() if "SEED" in line]
    assert "environment variable `DEEPINFER_SEED` is 'x'" in seed
    assert "options.toml" in str(caught.value)
    assert "`numerics` is 'y'" in str(caught.value)


def test_both_cache_sizes_contradict() -> None:
    with pytest.raises(ConfigError, match=r"`num_blocks` is 8 and `cache_memory_gib` is 1.*one"):
        EngineConfig(num_blocks=8, cache_memory_gib=1)


@pytest.mark.parametrize("content", [b"block_size 64", b"\xff\xfe"])
def test_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "options.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"options.toml' is not TOML"):
        EngineConfig.load(file, {}, {})


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineConfig.load(tmp_path / "none.toml", {}, {})


def test_options_cannot_be_changed_afterwards() -> None:
    config = EngineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.block_size = 32  # type: ignore[misc]


def test_every_option_has_help_and_a_group() -> None:
    for name, field in EngineConfig.model_fields.items():
        assert field.description and field.title, name


def test_all_names_are_shown_when_none_is_near() -> None:
    assert did_you_mean("zzz", ["alpha", "beta"]) == "Known: `alpha`, `beta`."


def test_stored_windows_without_a_prefix_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match="`stored_windows` is 2"):
        EngineConfig(stored_windows=2, prefix_cache=False)
