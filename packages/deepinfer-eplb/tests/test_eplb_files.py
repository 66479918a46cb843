"""Files of loads, traces and maps: what comes back, and what is refused."""

from __future__ import annotations

import io
import json
import pickle
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest

from deepinfer_eplb import FileError, Plan, PlanInputError, Planner, SettingError, drawing
from deepinfer_eplb import arrays as arrays_module
from deepinfer_eplb.dispatch import to_physical
from deepinfer_eplb.drawing import check_plot, plot_rank_loads
from deepinfer_eplb.files import StoredMap, Trace, load_loads, load_map, load_trace, save_map

LOADS = np.random.default_rng(5).integers(1, 100, (3, 12))


def made(split: str = "quota", excluded: tuple[int, ...] = ()) -> Plan:
    planner = Planner(split=split, excluded_ranks=excluded)
    return planner.plan(LOADS, ranks=4, nodes=2, slots_per_rank=5)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, object]:
    """The fields of a sound map of JSON."""
    save_map(tmp_path / "sound.json", made())
    fields: dict[str, object] = json.loads((tmp_path / "sound.json").read_text(encoding="utf-8"))
    return fields


def write(path: Path, fields: object) -> Path:
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


# maps


@pytest.mark.parametrize("name", ["map.json", "map.npz"])
@pytest.mark.parametrize(("split", "excluded"), [("even", ()), ("quota", ()), ("quota", (1,))])
def test_a_map_comes_back_as_it_was(
    tmp_path: Path, name: str, split: str, excluded: tuple[int, ...]
) -> None:
    plan = made(split, excluded)
    save_map(tmp_path / name, plan)
    found = load_map(tmp_path / name)
    assert found.physical_to_logical.dtype == np.int32
    assert np.array_equal(found.physical_to_logical, plan.physical_to_logical)
    assert (found.layout, found.num_experts) == (plan.layout, 12)
    assert (found.split is None) == (split == "even")
    if found.split is not None:
        assert np.array_equal(found.split, plan.split)
    assert (found.ratio_before, found.moves) == (None, 0)
    assert found.ratio_after == plan.ratio_after
    assert np.array_equal(found.logical_to_physical, plan.logical_to_physical)
    assert np.array_equal(found.num_replicas, plan.num_replicas)


def test_what_was_read_is_written_the_same(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    live = made().physical_to_logical
    plan = Planner().plan(LOADS[:, ::-1], ranks=4, nodes=2, slots_per_rank=5, prev=live)
    save_map(first, plan)
    save_map(second, load_map(first))
    assert first.read_bytes() == second.read_bytes()
    assert load_map(second).ratio_before == plan.ratio_before
    assert load_map(second).moves == plan.moves > 0


def test_a_map_is_json_with_a_layer_a_line(tmp_path: Path) -> None:
    save_map(tmp_path / "map.json", made("even"))
    text = (tmp_path / "map.json").read_text(encoding="utf-8")
    assert json.loads(text)["version"] == 1
    assert len(text.splitlines()) == 2 + 11 + 3 + 1  # braces, fields, layers and their bracket


def test_dispatch_takes_a_map_of_a_file_as_it_takes_its_plan(tmp_path: Path) -> None:
    plan = made()
    save_map(tmp_path / "map.npz", plan)
    ids = np.arange(12).reshape(6, 2)
    rows = {"token_ids": np.arange(6), "positions": np.arange(6)}
    found = to_physical(ids, 1, load_map(tmp_path / "map.npz"), "quota", **rows)
    assert np.array_equal(found, to_physical(ids, 1, plan, "quota", **rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "`version` is 2; allowed: 1"),
        ({"version": True}, "`version` holds a bool where a number is needed"),
        ({"num_ranks": 4.0}, "`num_ranks` is 4.0; allowed: whole numbers from 1"),
        ({"num_ranks": 0}, "`num_ranks` is 0; allowed"),
        ({"num_ranks": 10**12}, "slots, but rows of `physical_to_logical` have 20"),
        ({"num_ranks": 10**30}, "passes 64 bits"),
        ({"num_nodes": 3}, "give a number of nodes that divides 4"),
        ({"num_experts": 11}, "allowed: 0 to 10"),
        ({"num_experts": 10**9}, "1000000000 experts do not fit"),
        ({"num_experts": [12]}, "`num_experts` holds a list where a number is needed"),
        ({"excluded_ranks": [9]}, "Excluded rank 9 is none of the 4"),
        ({"excluded_ranks": [0.5]}, "`excluded_ranks` is"),
        ({"excluded_ranks": None}, "holds a NoneType where a list is needed"),
        ({"excluded_ranks": [1]}, "allowed: -1, since its rank is excluded"),
        ({"physical_to_logical": [[1, 2], [3]]}, "lists of different lengths"),
        ({"physical_to_logical": [1, 2]}, "holds a int where a list is needed, 1 lists deep"),
        ({"physical_to_logical": "none"}, "holds a str where a list is needed"),
        ({"physical_to_logical": [["1"]]}, "holds a str where a number is needed"),
        ({"split": [[0.5] * 20]}, "`split` has shape [1, 20]"),
        ({"split": [[2.0] * 20] * 3}, "`split`[0, 0] is 2.0; allowed: 0 to 1"),
        ({"split": [[0.7] * 20] * 3}, "over its replicas; needed: 1"),
        ({"ratio_after": 0.5}, "`ratio_after` is 0.5; allowed: finite numbers from 1"),
        ({"moves": -1}, "`moves` is -1; allowed"),
        ({"note": 1}, "`note` is unknown; allowed: `version`"),
    ],
)
def test_a_map_that_is_not_whole_is_refused_by_name(
    tmp_path: Path, stored: dict[str, object], change: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "map.json", stored | change)
    with pytest.raises(FileError) as refused:
        load_map(path)
    assert str(path) in str(refused.value) and message in str(refused.value)


def test_a_map_that_loses_an_expert_says_which(tmp_path: Path, stored: dict[str, object]) -> None:
    slots = np.array(stored["physical_to_logical"])
    others = [expert for expert in range(12) if expert != 7]
    slots[1] = [others[i % 11] for i in range(20)]
    path = write(tmp_path / "map.json", stored | {"physical_to_logical": slots.tolist()})
    with pytest.raises(FileError, match="loses expert 7 of layer 1"):
        load_map(path)


@pytest.mark.parametrize("field", ["version", "num_ranks", "physical_to_logical", "excluded_ranks"])
def test_a_field_that_is_missing_is_named(
    tmp_path: Path, stored: dict[str, object], field: str
) -> None:
    del stored[field]
    with pytest.raises(FileError, match=f"`{field}` is missing"):
        load_map(write(tmp_path / "map.json", stored))


def test_a_split_may_not_give_work_to_an_excluded_rank(tmp_path: Path) -> None:
    save_map(tmp_path / "map.json", made(excluded=(0,)))
    fields = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    fields["split"][2][3] = 0.1
    with pytest.raises(FileError, match=r"`split`\[2, 3\] is 0.1; allowed: 0, since its rank"):
        load_map(write(tmp_path / "map.json", fields))


# writing


def test_a_file_that_is_there_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "map.json"
    save_map(path, made())
    before = path.read_bytes()

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays_module.os, "fsync", fails)
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        save_map(path, made("even"))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["map.json"]
    monkeypatch.undo()
    with path.open("rb") as reader:
        save_map(path, made("even"))
        assert reader.read() == before  # who had it open has the old one, whole
    assert path.read_bytes() != before
    assert [each.name for each in tmp_path.iterdir()] == ["map.json"]


def test_others_may_read_a_map_as_they_may_read_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    save_map(tmp_path / "map.npz", made())
    modes = [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("plain", "map.npz")]
    assert modes[0] == modes[1]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none/map.json` cannot be written: No such file"):
        save_map(tmp_path / "none" / "map.json", made())
    with pytest.raises(FileError, match=r"ends in '.txt'; allowed: .json and .npz"):
        save_map(tmp_path / "map.txt", made())


# loads and traces


@pytest.mark.parametrize("name", ["loads.json", "loads.npz"])
@pytest.mark.parametrize("with_history", [False, True])
def test_loads_come_as_floats_with_their_pieces(
    tmp_path: Path, name: str, with_history: bool
) -> None:
    history = np.stack([LOADS, LOADS + 1])
    fields = {"loads": history.sum(0)} | ({"history": history} if with_history else {})
    if name.endswith("npz"):
        np.savez(tmp_path / name, **fields)
    else:
        write(tmp_path / name, {key: value.tolist() for key, value in fields.items()})
    found = load_loads(tmp_path / name)
    assert found.loads.dtype == np.float64 and np.array_equal(found.loads, 2 * LOADS + 1)
    if with_history:
        assert found.history is not None and np.array_equal(found.history, history)
    else:
        assert found.history is None


@pytest.mark.parametrize("dtype", [">i4", "u8", "f4", "f2", "i1"])
def test_numbers_of_any_kind_and_order_are_read(tmp_path: Path, dtype: str) -> None:
    np.savez(tmp_path / "loads.npz", loads=np.asfortranarray(LOADS.astype(dtype)))
    assert np.array_equal(load_loads(tmp_path / "loads.npz").loads, LOADS)


@pytest.mark.parametrize("steps", [None, 100])
def test_a_trace_may_say_how_long_its_pieces_are(tmp_path: Path, steps: int | None) -> None:
    hits = np.stack([LOADS] * 4)
    more = {} if steps is None else {"steps_per_piece": steps}
    np.savez_compressed(tmp_path / "trace.npz", hits=hits, **more)
    found = load_trace(tmp_path / "trace.npz")
    assert np.array_equal(found.hits, hits) and found.steps_per_piece == steps


def test_the_end_of_a_trace_is_loads_and_whole_windows_of_history() -> None:
    hits = np.arange(11 * 2 * 3, dtype=float).reshape(11, 2, 3)
    found = Trace(hits, None).last(4, 3)
    assert found.history is not None
    assert np.array_equal(found.loads, hits[7:].sum(0))
    assert np.array_equal(found.history, hits[3:])  # two windows: three would be 12 pieces
    assert np.array_equal(Trace(hits, None).last(4, 1).history, hits[7:])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((12, 1), "has 11 pieces, fewer than a window; give `pieces_per_window` 11 or less"),
        ((0, 1), "`pieces_per_window` is 0"),
        ((4, 0), "`num_windows` is 0"),
    ],
)
def test_a_window_that_a_trace_has_not_is_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        Trace(np.ones((11, 2, 3)), None).last(*sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"loads": [[1, NaN]]}', "it has NaN, which is no JSON"),
        ('{"loads": [[1, -Infinity]]}', "it has -Infinity"),
        ('{"loads": [[1, 1e999]]}', "is inf; loads are counts of tokens"),
        ('{"loads": [[1, -2]]}', "`loads`[0, 1] is -2; loads are counts"),
        ('{"loads": [[1, true]]}', "holds a bool where a number is needed"),
        ('{"loads": [[1, null]]}', "holds a NoneType"),
        ('{"loads": [[1, 2]], "loads": [[3, 4]]}', "`loads` is there twice"),
        ('{"loads": [[1, 2]], "more": 1}', "`more` is unknown; allowed: `loads`, `history`"),
        ('{"loads": [[]]}', "`loads` has shape [1, 0]"),
        ('{"loads": [1, 2]}', "1 lists deep"),
        ('{"loads": [[[1]]]}', "holds a list where a number is needed"),
        ('{"loads": [[1, 2]], "history": [[[1, 2, 3]]]}', "layers and experts must be the same"),
        ('{"history": [[[1, 2]]]}', "`loads` is missing"),
        ("[[1, 2]]", "it must be one object"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ('{"loads": [[' + "9" * 5000 + "]]}", "it is not JSON"),
        ('{"loads": [[' + "9" * 400 + ", 0.5]]}", "passes 64 bits"),
    ],
)
def test_json_that_holds_no_loads_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError) as refused:
        load_loads(path)
    assert str(path) in str(refused.value) and message in str(refused.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none.json` cannot be read: No such file"):
        load_loads(tmp_path / "none.json")
    with pytest.raises(FileError, match=r"allowed: .json and .npz"):
        load_loads(tmp_path / "loads.csv")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(FileError, match="no regular file"):
        load_loads(tmp_path / "folder.npz")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(FileError, match="it is not JSON"):
        load_loads(tmp_path / "bytes.json")
    (tmp_path / "text.npz").write_text("loads")
    with pytest.raises(FileError, match="no sound NPZ file"):
        load_loads(tmp_path / "text.npz")


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def member(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data


def header(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}"


class Evil:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("ran"),))  # type: ignore[return-value]


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([[Evil()]], object), allow_pickle=True)
    path = archive(tmp_path / "loads.npz", {"loads.npy": stream.getvalue()})
    with pytest.raises(FileError, match="`loads` has dtype object; needed: integers or floats"):
        load_loads(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FileError, match="no sound NPZ"):
        load_loads(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (member(header("<f8", (10**6, 10**6))), "1000000000000 values; allowed: up to"),
        (member(header("<f8", (2, 3)), bytes(40)), "not the bytes that its shape [2, 3] needs"),
        (member(header("<f8", (2, 3)), bytes(56)), "not the bytes that its shape"),
        (member(header("<f8", (-2, -3)), bytes(48)), "sizes to"),
        (member(header("<c16", (1, 1)), bytes(16)), "dtype complex128"),
        (member(header("<f16", (1, 1)), bytes(16)), "8 bytes at most"),
        (member(header("|b1", (1, 1)), bytes(1)), "dtype bool"),
        (member("{'descr': '<f8'"), "`loads` is no array"),
        (member(header("<f8", (1, 1)), bytes(8), b"\x09\x00"), "its header has version (9, 0)"),
        (b"loads", "`loads` is no array"),
        (b"", "`loads` is no array"),
    ],
)
def test_arrays_are_checked_before_they_are_read(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = archive(tmp_path / "loads.npz", {"loads.npy": content})
    with pytest.raises(FileError) as refused:
        load_loads(path)
    assert str(path) in str(refused.value) and message in str(refused.value)


def test_arrays_with_any_one_byte_changed_are_read_or_refused(tmp_path: Path) -> None:
    whole = member(header("<i8", (1, 2)), bytes(16))
    random = np.random.default_rng(11)
    path, refused = tmp_path / "loads.npz", 0
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] = random.integers(256)
        try:
            load_loads(archive(path, {"loads.npy": bytes(content)}))
        except FileError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("shape", [(), (2,), (1, 1, 2)])
def test_arrays_of_other_dimensions_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "loads.npz", loads=np.ones(shape))
    with pytest.raises(FileError, match=f"`loads` has {len(shape)} dimensions; needed: 2"):
        load_loads(tmp_path / "loads.npz")


def test_an_archive_with_other_or_double_members_is_refused(tmp_path: Path) -> None:
    array = member(header("<i8", (1, 2)), bytes(16))
    path = archive(tmp_path / "loads.npz", {"loads.npy": array, "weights.npy": array})
    with pytest.raises(FileError, match="`weights` is unknown"):
        load_loads(path)
    path = archive(tmp_path / "loads.npz", {"loads.npy": array, "loads": array})
    with pytest.raises(FileError, match="`loads` is there twice"):
        load_loads(path)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads.npz"
    np.savez(path, loads=LOADS)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="no sound NPZ file: Bad CRC"):
        load_loads(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "map.npz"
    save_map(whole, made())
    content = whole.read_bytes()
    for end in range(0, len(content), 37):
        path.write_bytes(content[:end])
        with pytest.raises(FileError):
            load_map(path)


def test_json_that_is_too_large_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays_module, "_MOST_TEXT", 50)
    with pytest.raises(FileError, match="bytes; allowed: 50"):
        load_loads(write(tmp_path / "loads.json", {"loads": LOADS.tolist()}))


def test_a_stored_map_can_be_made_by_hand(tmp_path: Path) -> None:
    plan = made()
    mine = StoredMap(plan.physical_to_logical, 12, plan.layout)
    save_map(tmp_path / "map.json", mine)
    found = load_map(tmp_path / "map.json")
    assert (found.ratio_after, found.moves, found.split) == (None, None, None)


def test_a_plot_of_unknown_format_is_refused() -> None:
    with pytest.raises(SettingError, match=r"ends in '.gif'; allowed: .png, .svg, .pdf"):
        check_plot(Path("ranks.gif"))


def test_a_plot_of_ranks_says_which_layers_and_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs the extra `plot`")
    drawn = []
    monkeypatch.setattr(drawing, "save_figure", lambda path, figure: drawn.append(figure))
    after = np.ones((8, 4))
    before = np.array([[1.0, 1, 1, 1 + layer] for layer in range(8)])
    plot_rank_loads(tmp_path / "ranks.png", after, before, ("in order", "after"))
    panes = [pane for pane in drawn[0].axes if pane.get_title()]
    ratios = [4 * (1 + layer) / (4 + layer) for layer in range(2, 8)]
    assert [pane.get_title() for pane in panes] == [
        f"layer {layer}: {ratio:.3f} to 1.000" for layer, ratio in enumerate(ratios, 2)
    ]
    title = drawn[0].get_suptitle()
    assert title == "Load of ranks in the worst 6 of 8 layers; slowest/mean, 'in order' to 'after'"
    assert {pane.get_ylim()[0] for pane in panes} == {0}
    assert all((pane.get_xticks() % 1 == 0).all() for pane in panes)
    plot_rank_loads(tmp_path / "ranks.png", after[:2], None)
    assert drawn[1].get_suptitle() == "Load of ranks in all layers; slowest/mean, 'after'"


@pytest.mark.parametrize(
    ("shape", "words"),
    [(f"({2**70}, 0)", "sizes to"), (f"({'1,' * 70})", "70 dimensions"), ("(True, 3)", "sizes to")],
)
def test_headers_with_impossible_shapes_are_refused(tmp_path: Path, shape: str, words: str) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    path = tmp_path / "loads.npz"
    with zipfile.ZipFile(path, "w") as archive:
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        archive.writestr("loads.npy", content)
    with pytest.raises(FileError, match=words):
        load_loads(path)


def test_a_name_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(FileError, match="zero byte"):
        load_loads(Path("loads\0.npz"))
