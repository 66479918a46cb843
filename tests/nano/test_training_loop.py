from __future__ import annotations

import hashlib
import json
import os
import random
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nano.training import curve
from nano.training.loader import Batch
from nano.training.loop import Diverged, LoopSettings, Piece, Progress, learning_rate, run
from nano.training.optimizer import Optimizer, OptimizerSettings, orthogonalize
from nano.training.state import SavedState, StateError, load, round_to_24_bits, save
from torch import Tensor


class Toy:
    """A regression that a small MLP with a stack of matrices and biases can learn."""

    def __init__(self, device: str = "cpu", *, breaks_at: frozenset[int] = frozenset()) -> None:
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator) * 0.1
            return drawn.to(device).requires_grad_()

        self.parameters: dict[str, Tensor] = {
            "first": weight(16, 8),
            "tall": weight(2, 16, 16),
            "last": weight(4, 16),
            "bias": weight(4),
        }
        self.buffers: dict[str, Tensor] = {"bias": torch.zeros(4, device=device)}
        self.muon = frozenset({"first", "tall", "last"})
        self.breaks_at = breaks_at

    def schedule(self, step: int) -> dict[str, float | bool]:
        return {"quantization": float(step > 5), "broken": step in self.breaks_at}

    def loss(
        self, parameters: Mapping[str, Tensor], batch: Batch, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x = batch.weights
        wanted = torch.stack([x[:, 0] - x[:, 1], x[:, 2].abs(), x[:, 3], x[:, 4]], -1)
        hidden = (x @ parameters["first"].T).relu()
        for matrix in parameters["tall"]:
            hidden = hidden + (hidden @ matrix.T).relu()
        error = hidden @ parameters["last"].T + parameters["bias"] - wanted
        loss = error.square().mean()
        loss = loss + torch.where(inputs["broken"], torch.nan, 0.0)
        return loss, {"load": error.detach().mean(0), "size": x.abs().mean()}

    def after_step(self, metrics: Mapping[str, Tensor]) -> None:
        self.buffers["bias"] += metrics["load"].sign() * 0.001


def toy_batches(start: int) -> Generator[Batch, None, None]:
    step = start
    while True:
        generator = torch.Generator().manual_seed(step)
        values = torch.randn(64, 8, generator=generator)
        yield Batch(values.int(), values.int(), values)
        step += 1


def train(folder: Path, toy: Toy, settings: LoopSettings, seconds: float = 1e9) -> Progress:
    # As if each piece had begun 100 s ago.
    piece = Piece(folder, folder / "log.jsonl", seconds, time.monotonic() - 100)
    return run(toy, settings, piece, toy_batches, show=lambda line: None)


def test_toy_converges(tmp_path: Path) -> None:
    settings = LoopSettings(300, 64, peak_lr=0.02, warmup_steps=10, decay_steps=200, log_every=50)
    done = train(tmp_path, Toy(), settings)
    assert done.finished
    assert done.step == 300
    assert done.records[0]["loss"] > 10 * done.records[-1]["loss"]
    assert done.records[-1]["loss"] < 0.05


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 64), (5, 64, 192)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(drawn, 7))
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_orthogonalize_keeps_zero() -> None:
    assert orthogonalize(torch.zeros(2, 4, 8)).count_nonzero() == 0


def test_muon_update_has_the_promised_size_and_direction() -> None:
    weights = {"tall": torch.zeros(64, 16), "stack": torch.zeros(2, 16, 64)}
    optimizer = Optimizer(weights, frozenset(weights), OptimizerSettings(muon_decay=0.0))
    generator = torch.Generator().manual_seed(2)
    grads = {name: torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    optimizer.step(grads, torch.tensor(0.01))
    for name, weight in weights.items():
        assert (weight * grads[name]).sum() < 0
        # An orthogonal [16, 64] has entries of 1/8; times 0.2 * 8 that is Adam's usual 0.2.
        assert 0.7 * 0.002 < weight.square().mean().sqrt() < 1.2 * 0.002


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    toy = Toy()
    optimizer = Optimizer(toy.parameters, toy.muon)
    good = {name: torch.ones_like(weight) for name, weight in toy.parameters.items()}
    optimizer.step(good, torch.tensor(0.01))
    weights = {name: weight.detach().clone() for name, weight in toy.parameters.items()}
    moments = {name: moment.clone() for name, moment in optimizer.state().items()}
    bad = good | {"bias": torch.full((4,), torch.inf)}
    assert not optimizer.step(bad, torch.tensor(0.01)).applied
    assert not optimizer.step(good, torch.tensor(0.01), torch.tensor(False)).applied
    assert all(torch.equal(toy.parameters[name], weight) for name, weight in weights.items())
    assert all(torch.equal(optimizer.state()[name], moment) for name, moment in moments.items())


def test_gradients_are_clipped_by_their_common_norm() -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    optimizer = Optimizer(weights, frozenset(), OptimizerSettings(clip_norm=0.5))
    facts = optimizer.step({"a": torch.ones(3), "b": torch.ones(2, 2)}, torch.tensor(0.1))
    assert float(facts.grad_norm) == pytest.approx(7**0.5)
    first = torch.cat([optimizer.state()[f"{name}.first"].float().flatten() for name in weights])
    assert float(first.norm()) == pytest.approx(0.1 * 0.5, rel=0.01)


def test_optimizer_state_has_the_shapes_of_the_weights() -> None:
    toy = Toy()
    state = Optimizer(toy.parameters, toy.muon).state()
    for name, weight in toy.parameters.items():
        kinds = ["momentum"] if name in toy.muon else ["first", "second"]
        assert all(state[f"{name}.{kind}"].shape == weight.shape for kind in kinds)


def test_pieces_give_the_bits_of_one_run(tmp_path: Path) -> None:
    settings = LoopSettings(14, 64, warmup_steps=3, decay_steps=5, log_every=7)
    whole, first, second = Toy(), Toy(), Toy()
    train(tmp_path / "whole", whole, settings)
    stopped = train(tmp_path / "cut", first, settings, seconds=0)
    assert stopped.step == 7
    assert not stopped.finished
    resumed = train(tmp_path / "cut", second, settings, seconds=0)
    assert resumed.finished
    assert stopped.seconds >= 100
    assert resumed.seconds >= 200
    for name, weight in whole.parameters.items():
        assert torch.equal(weight, second.parameters[name]), name
    assert torch.equal(whole.buffers["bias"], second.buffers["bias"])
    one, two = (
        [shard.read_bytes() for shard in sorted((tmp_path / name).glob("state-*.bin"))]
        for name in ("whole", "cut")
    )
    assert one == two
    lines = (tmp_path / "cut" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [7, 14]


def test_a_finished_phase_does_nothing_more(tmp_path: Path) -> None:
    settings = LoopSettings(3, 64)
    train(tmp_path, Toy(), settings)
    saved = (tmp_path / "state.json").read_bytes()
    assert train(tmp_path, Toy(), settings).finished
    assert (tmp_path / "state.json").read_bytes() == saved


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path, Toy(), LoopSettings(3, 64, phase={"rows": "a"}))
    with pytest.raises(StateError, match=r"`peak_lr` is 0\.5 now and was 0\.01"):
        train(tmp_path, Toy(), LoopSettings(3, 64, peak_lr=0.5, phase={"rows": "a"}))
    with pytest.raises(StateError, match="`phase`"):
        train(tmp_path, Toy(), LoopSettings(3, 64, phase={"rows": "b"}))


def test_some_broken_steps_are_skipped_and_many_end_the_run(tmp_path: Path) -> None:
    settings = LoopSettings(30, 64, log_every=10, max_skipped=5)
    done = train(tmp_path / "few", Toy(breaks_at=frozenset({2, 3, 15})), settings)
    assert [record["skipped"] for record in done.records] == [2, 1, 0]
    with pytest.raises(Diverged, match="5 steps in a row"):
        train(tmp_path / "many", Toy(breaks_at=frozenset(range(8, 13))), settings)


def test_learning_rate_warms_up_stays_and_falls() -> None:
    settings = LoopSettings(100, 1, peak_lr=1.0, warmup_steps=10, decay_steps=20)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[80] == 1.0
    assert rates[99] == pytest.approx(0.05)


def test_state_round_trip_and_damage(tmp_path: Path) -> None:
    weights = {"w": torch.randn(7, 5), "s": torch.randn(())}
    round_to_24_bits(weights)
    tensors = {
        "b": torch.randn(3, 2).bfloat16(),
        "i": torch.arange(5),
        "f": torch.randn(1),
    }
    save(tmp_path, SavedState(4, 1.5, weights, tensors, [{"step": 4}]), {"a": (1, 2)})
    found = load(tmp_path, {"a": [1, 2]})
    assert found is not None
    assert (found.step, found.seconds, found.records) == (4, 1.5, [{"step": 4}])
    for kept, given in ((found.weights, weights), (found.tensors, tensors)):
        assert kept.keys() == given.keys()
        assert all(torch.equal(kept[name], given[name]) for name in given)
        assert all(kept[name].dtype == given[name].dtype for name in given)
    shard = tmp_path / "state-4-0.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StateError, match="cut off"):
        load(tmp_path, {"a": [1, 2]})
    assert load(tmp_path / "empty", {}) is None


def save_toy(folder: Path, step: int, value: float | None = None) -> None:
    """Save a state of three shards (if they hold 100 bytes) full of one value."""
    weights = {"w": torch.full((10, 10), float(step) if value is None else value)}
    save(folder, SavedState(step, 1.0, weights, {}, [{"step": step}]), {"a": 1})


def sign(index: dict[str, Any]) -> str:
    plain = {key: value for key, value in index.items() if key != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return json.dumps(plain | {"sha256": hashlib.sha256(text.encode()).hexdigest()})


# All by which `save` changes the folder.
_CHANGES: list[tuple[Any, str]] = [
    (Path, "open"),
    (os, "fsync"),
    (os, "replace"),
    (Path, "unlink"),
]
BROKEN_INDEXES: dict[str, bytes | Callable[[dict[str, Any]], dict[str, Any] | str]] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "object": b"{}",
    "list": b"[1]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "step": lambda index: json.dumps(index | {"step": 5}),
    "no checksum": lambda index: json.dumps({k: v for k, v in index.items() if k != "sha256"}),
    "signed, no fields": lambda index: sign({}),
    "signed, no records": lambda index: sign({k: v for k, v in index.items() if k != "records"}),
    "signed, step": lambda index: sign(index | {"step": "4"}),
    "signed, records": lambda index: sign(index | {"records": [4]}),
    "signed, shards": lambda index: sign(index | {"shards": ["state-4-0.bin"]}),
    "signed, shard outside": lambda index: sign(
        index | {"shards": [index["shards"][0] | {"name": "../state-4-0.bin"}]}
    ),
    "signed, no tensors": lambda index: sign(index | {"tensors": []}),
    "signed, shape": lambda index: sign(
        index | {"tensors": [index["tensors"][0] | {"shape": [10, 11]}]}
    ),
    "signed, negative": lambda index: sign(
        index | {"tensors": [index["tensors"][0] | {"shape": [-10, -10]}]}
    ),
    "signed, kind": lambda index: sign(
        index | {"tensors": [index["tensors"][0] | {"kind": ["float24"]}]}
    ),
}


@pytest.mark.parametrize("name", BROKEN_INDEXES)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, name: str) -> None:
    save_toy(tmp_path, 4)
    path = tmp_path / "state.json"
    damage = BROKEN_INDEXES[name]
    found = damage if isinstance(damage, bytes) else damage(json.loads(path.read_bytes()))
    path.write_bytes(found if isinstance(found, bytes) else str(found).encode())
    with pytest.raises(StateError, match=r"state\.json` .*Restore the folder from a copy"):
        load(tmp_path, {"a": 1})


def test_an_index_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    save_toy(tmp_path, 4)
    path = tmp_path / "state.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(StateError, match=r"state\.json` is not JSON"):
            load(tmp_path, {"a": 1})


def test_the_checksum_is_that_of_the_canonical_index(tmp_path: Path) -> None:
    # Number keys sort otherwise than the strings that JSON makes of them.
    settings = {"a": {10: 1, 9: (2, None)}, "\u00fc": 0.1}
    save(tmp_path, SavedState(1, 0.0, {"w": torch.zeros(2)}, {}), settings)
    text = (tmp_path / "state.json").read_text()
    assert json.loads(sign(json.loads(text))) == json.loads(text)
    assert load(tmp_path, settings) is not None


def test_shards_without_an_index_are_no_fresh_start(tmp_path: Path) -> None:
    save_toy(tmp_path, 4)
    (tmp_path / "state.json").unlink()
    with pytest.raises(StateError, match=r"state\.json` is missing, but .*delete the folder"):
        load(tmp_path, {"a": 1})


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    save_toy(tmp_path, 4)
    (tmp_path / "state-4-0.bin").unlink()
    with pytest.raises(StateError, match=r"state-4-0\.bin` .*missing"):
        load(tmp_path, {"a": 1})


@pytest.mark.parametrize("again", [8, 4], ids=["a later step", "the same step"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    class Killed(BaseException):
        """Not caught by any cleaning up."""

    monkeypatch.setattr("nano.training.state.SHARD_BYTES", 100)
    whole = {name: getattr(owner, name) for owner, name in _CHANGES}
    moments = 0
    for moment in range(100):
        folder = tmp_path / str(moment)
        save_toy(folder, 4)
        left = iter([False] * moment + [True])

        def act(name: str, *args: Any, left: Any = left, **kwargs: Any) -> Any:
            if next(left, False):
                raise Killed
            return whole[name](*args, **kwargs)

        with monkeypatch.context() as patches:
            for owner, name in _CHANGES:
                patches.setattr(owner, name, lambda *a, name=name, **k: act(name, *a, **k))
            try:
                save_toy(folder, again, 2.5)
                ended = True
            except Killed:
                ended = False
        found = load(folder, {"a": 1})
        assert found is not None
        value = found.weights["w"][0, 0].item()
        assert (found.step, value) in [(4, 4.0), (again, 2.5)]
        assert found.weights["w"].unique().tolist() == [value]
        # The next save clears away what the killed one left.
        save_toy(folder, 9)
        assert {file.name for file in folder.iterdir()} == {
            "state.json",
            *(f"state-9-{number}.bin" for number in range(3)),
        }
        moments = moment
        if ended:
            break
    # Three shards and the index are opened and synced, the index renamed, old shards deleted.
    assert moments == 4 * 2 + 1 + 3


def test_rounding_to_24_bits_is_close_and_idempotent() -> None:
    weights = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(5))}
    before = weights["w"].clone()
    round_to_24_bits(weights)
    once = weights["w"].clone()
    round_to_24_bits(weights)
    assert torch.equal(weights["w"], once)
    assert ((once - before) / before).abs().max() <= 2.0**-16


def test_state_of_the_nano_size_fits_the_limit(tmp_path: Path) -> None:
    weights = {"muon": torch.zeros(6_400, 1_000), "adam": torch.zeros(2_500, 1_000)}
    optimizer = Optimizer(weights, frozenset({"muon"}))
    records = [{"step": step, "loss": 0.123456789, "lr": 0.01} for step in range(400)]
    size = save(tmp_path, SavedState(1, 1.0, weights, optimizer.state(), records), {})
    files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) == size <= 52e6
    assert max(file.stat().st_size for file in files) <= 15 * 2**20
    assert len(files) <= 6


def test_curve_is_well_formed_and_marks_the_changes(tmp_path: Path) -> None:
    randomness = random.Random("curve")
    log = tmp_path / "log.jsonl"
    with log.open("w") as file:
        for step in range(1, 201):
            record = {
                "tokens": step * 2_000_000,
                "loss": 8 * step**-0.6 * randomness.uniform(0.9, 1.1),
                "lr": 0.01 * min(1, step / 10, (201 - step) / 60),
                "inputs": {"sparse_selection": step > 60, "quantization": max(0, step - 150)},
            }
            file.write(json.dumps(record) + "\n")
    out = tmp_path / "out.svg"
    label = "quantization=rounding sets in"
    curve.main([str(log), str(out), "--title", "Loss < 1 & falling", "--label", label])
    root = ElementTree.fromstring(out.read_text())
    texts = {"".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")}
    wanted = {"sparse selection", "rounding sets in", "learning rate falls", "Loss < 1 & falling"}
    assert wanted <= texts
    assert "million tokens" in texts
