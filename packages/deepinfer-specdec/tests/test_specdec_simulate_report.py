"""The table, the JSON line and the plot of a simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.simulate import (
    Line,
    Sweep,
    Traffic,
    check_plot,
    describe,
    json_line,
    plot,
    table,
)

LINES = [
    Line(4, "fixed-5", 5.0, 3.2, 1.0, 2.5, 1.0, 2.5, 1.0, 0.25),
    Line(4, "delayed", 4.5, 3.1, 0.99996, 2.6, None, None, 0.5, 0.0),
    Line(60, "group-k", 3.25, 3.1, None, None, 1.116, 2.1, 0.01, 0.0),
]


def test_the_table_has_a_row_for_each_line_and_a_dash_for_what_does_not_apply() -> None:
    rows = [line.split() for line in table(LINES, 64).splitlines()]
    assert rows[0][:6] == ["rows", "policy", "verified", "length", "1", "rank"]
    assert "64 ranks" in table(LINES, 64)
    full = ["4", "fixed-5", "5.00", "3.200", "+0.0%", "+150.0%", "+0.0%", "+150.0%"]
    assert rows[1] == [*full, "100%", "25.0%"]
    assert rows[2] == ["4", "delayed", "4.50", "3.100", "+0.0%", "+160.0%", "-", "-", "50%", "0.0%"]
    assert rows[3] == []
    assert rows[4][:8] == ["60", "group-k", "3.25", "3.100", "-", "-", "+11.6%", "+110.0%"]


def test_the_json_line_has_what_is_needed_to_repeat_it() -> None:
    asked = Sweep(loads=(4, 60), ranks=3, seed=5, traffic=Traffic(noise=0.1))
    text = json_line(asked, LINES, {"command": "deepinfer-specdec simulate"})
    assert "\n" not in text
    found = json.loads(text)
    assert found["asked"]["seed"] == 5
    assert found["asked"]["traffic"]["noise"] == 0.1
    assert found["asked"]["point"]["row_share"] == 0.39
    assert found["lines"][2]["group_to_fixed"] == 1.116
    assert found["lines"][2]["alone_to_fixed"] is None
    assert found["command"] == "deepinfer-specdec simulate"
    assert found["device"].startswith("cpu")
    assert set(found["versions"]) == {"python", "numpy", "torch", "deepinfer-specdec"}


def test_the_description_states_what_was_drawn() -> None:
    text = describe(Sweep())
    assert "5 drafts a block, mean length 3.29" in text
    assert "AUC 0.8" in text
    assert "correlates by 0.5" in text
    assert "correlates by 0.3" in describe(Sweep(traffic=Traffic(drift_correlation=0)))


def test_a_plot_of_another_format_is_refused() -> None:
    with pytest.raises(SettingError, match=r"'\.gif'; allowed: \.png, \.svg, \.pdf"):
        check_plot(Path("speed.gif"))


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match=r"deepinfer-specdec\[plot\]"):
        plot(tmp_path / "speed.png", LINES, 64)
    assert not (tmp_path / "speed.png").exists()


def test_a_plot_names_every_policy_on_its_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs the extra `plot`")
    path = tmp_path / "speed.svg"
    plot(path, LINES, 64)
    text = path.read_text(encoding="utf-8")
    for word in ("one rank", "group of 64 ranks", "fixed-5", "delayed", "group-k"):
        assert f"<!-- {word} -->" in text
    plot(tmp_path / "speed.png", LINES, 64)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs the extra `plot`")
    with pytest.raises(SettingError, match="cannot be written"):
        plot(tmp_path / "none" / "speed.png", LINES, 64)
