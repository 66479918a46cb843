"""The model over ragged batches, on generated checkpoints of two geometries: strict rows."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepinfer_core
from deepinfer_core.bench.make_checkpoint import (
    demo_config,
    second_geometry_config,
    write_checkpoint,
)
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.checkpoint import Checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import Tail
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import load_weights
from deepinfer_core.testing.runs import ModelRun, Recorder, load_run

NUMERICS = ("ideal", "cache", "release")
GEOMETRIES = {"demo": demo_config, "second": second_geometry_config}


@pytest.fixture(scope="module", params=GEOMETRIES)
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / request.param
    write_checkpoint(path, GEOMETRIES[request.param](), seed=3)
    return path


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "second"
    write_checkpoint(path, second_geometry_config(), seed=3)
    return path


def prompt(run: ModelRun, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = 3 + len(run.config.eos_token_ids)
    ids = torch.randint(low, run.config.vocab_size, (count,), generator=generator)
    return ids.masked_fill(ids == (run.config.image_token_id or -1), low)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_strict_rows_are_equal_for_every_chunk_size(folder, numerics):
    whole = load_run(folder, numerics)
    ids = prompt(whole, 67)
    wanted = whole.prefill(ids)
    for chunk in (1, 2, 3, 7, 64) if folder.name == "second" else (3, 64):
        found = load_run(folder, numerics).prefill(ids, chunk)
        assert torch.equal(found.hidden, wanted.hidden), chunk
        assert torch.equal(found.features, wanted.features), chunk


def test_fast_rows_agree_with_strict_rows(folder):
    strict, fast = load_run(folder, "ideal"), load_run(folder, "ideal", strict=False)
    ids = prompt(strict, 67)
    difference = strict.prefill(ids).hidden - fast.prefill(ids).hidden
    assert difference.abs().max() < 1e-3


def mixed_batch(run: ModelRun, parts, *, padding: int = 0):
    """Run rows of several sequences in one call: parts are (slot, start, ids)."""
    tokens = torch.cat([ids for _, _, ids in parts])
    rows = RowBatch.build(
        run.backend,
        [len(ids) for _, _, ids in parts],
        [start for _, start, _ in parts],
        [slot for slot, _, _ in parts],
        window=run.config.sliding_window,
        total=len(tokens) + padding,
        scratch_slot=run.state.sizes.num_slots,
    )
    tokens = torch.cat((tokens, torch.zeros(padding, dtype=torch.int64)))
    with torch.no_grad():
        done = run.model.forward(run.backend, tokens, rows, run.state)
    return done.hidden[: len(done.hidden) - padding].split([len(ids) for _, _, ids in parts])


@pytest.mark.parametrize("numerics", ["ideal", "release"])
@pytest.mark.parametrize("padding", [0, 5])
def test_chunk_decode_and_verify_rows_share_a_call(folder, numerics, padding):
    alone = load_run(folder, numerics, num_slots=3)
    ids = [prompt(alone, 40, seed) for seed in range(3)]
    wanted = [alone.prefill(each, slot=slot).hidden for slot, each in enumerate(ids)]
    run = load_run(folder, numerics, num_slots=3)
    mixed_batch(run, [(0, 0, ids[0][:30]), (2, 0, ids[2][:33])])
    parts = [(0, 30, ids[0][30:31]), (1, 0, ids[1][:21]), (2, 33, ids[2][33:37])]
    found = mixed_batch(run, parts, padding=padding)
    assert torch.equal(found[0], wanted[0][30:31])
    assert torch.equal(found[1], wanted[1][:21])
    assert torch.equal(found[2], wanted[2][33:37])
    (rest,) = mixed_batch(run, [(1, 21, ids[1][21:])])
    assert torch.equal(rest, wanted[1][21:])


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("accepted", range(6))
def test_refused_drafts_leave_no_trace(second, numerics, accepted):
    """Verify rows write all kinds of state; going on from an earlier position undoes them."""
    plain = load_run(second, numerics, max_drafts=5)
    ids = prompt(plain, 60)
    wanted = plain.prefill(ids).hidden
    run = load_run(second, numerics, max_drafts=5)
    run.forward(ids[:30])
    position, wrong = 30, prompt(run, 60, seed=9)
    while position + 6 <= len(ids):
        fed = torch.cat((ids[position : position + 1 + accepted], wrong[: 5 - accepted]))
        done = run.forward(fed, start=position)
        kept = slice(position, position + 1 + accepted)
        assert torch.equal(done.hidden[: 1 + accepted], wanted[kept])
        position += 1 + accepted


@pytest.mark.parametrize("numerics", ["ideal", "release"])
def test_decoder_replay_is_exact_when_the_tail_covers_every_window(second, numerics):
    exact, run = load_run(second, numerics), load_run(second, numerics)
    config, ids = run.config, prompt(run, 120)
    late = config.num_hidden_layers - 1 - config.last_kv_source
    wanted = exact.prefill(ids).hidden[-1]
    for tail in (config.sliding_window * late, 120):
        done = load_run(second, numerics).forward(ids, tail_start=120 - tail)
        assert torch.equal(done.hidden[-1], wanted), tail
    short = run.forward(ids, tail_start=120 - config.sliding_window)
    assert not torch.equal(short.hidden[-1], wanted), "the last window alone is an approximation"


def test_drafts_do_not_depend_on_other_sequences(folder):
    run = load_run(folder, "release", num_slots=2)
    ids = [prompt(run, 40, seed) for seed in range(2)]
    for slot, each in enumerate(ids):
        run.prefill(each, slot=slot)
    last = torch.tensor([5, 6])
    with torch.no_grad():
        both = run.model.drafter.draft(run.backend, last, [40, 40], [0, 1], run.state)
        for slot in range(2):
            one = run.model.drafter.draft(
                run.backend, last[slot : slot + 1], [40], [slot], run.state
            )
            assert torch.equal(one.logits[0], both.logits[slot])
            assert torch.equal(one.confidence[0], both.confidence[slot])
    size = run.config.dspark_block_size
    assert both.token_ids.shape == (2, size)


def test_a_step_without_rows_changes_nothing(folder):
    run = load_run(folder, "release")
    run.prefill(prompt(run, 20))
    before = [ring.data.clone() for ring in run.state.windows]
    rows = RowBatch.build(run.backend, [], [], [], window=run.config.sliding_window)
    done = run.model.forward(run.backend, torch.zeros(0, dtype=torch.int64), rows, run.state)
    assert done.hidden.shape == (0, run.config.hidden_size)
    assert run.logits(done.hidden).shape == (0, run.config.vocab_size)
    for ring, kept in zip(run.state.windows, before, strict=True):
        assert torch.equal(ring.data, kept)


def test_a_step_whose_rows_all_skip_the_late_layers(folder):
    run = load_run(folder, "release")
    none = torch.zeros(0, dtype=torch.int64)
    rows = RowBatch.build(run.backend, [9], [0], [0], window=run.config.sliding_window)
    done = run.model.forward(run.backend, prompt(run, 9), rows, run.state, tail=Tail(none, none))
    assert done.hidden.shape[0] == 0


def float_leaves(run: ModelRun) -> dict[str, torch.Tensor]:
    """Make every plain float weight of the model a leaf that wants a gradient."""
    leaves: dict[str, torch.Tensor] = {}

    def visit(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            leaves[name] = value.requires_grad_()
        elif isinstance(value, tuple):
            for place, each in enumerate(value):
                visit(each, f"{name}.{place}")
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                visit(getattr(value, field), f"{name}.{field}")

    visit(run.model.weights, "")
    return leaves


def loss_of(run: ModelRun, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss of one prompt and cross-entropy of the drafts after it, on fresh state."""
    state = ModelState.allocate(run.config, run.backend, run.state.sizes, drafter=True)
    for pool, table in run.state.tables.items():
        state.tables[pool].copy_(table)
    rows = RowBatch.build(run.backend, [len(ids)], [0], [0], window=run.config.sliding_window)
    done = run.model.forward(run.backend, ids, rows, state)
    logits = run.model.logits(run.backend, done.hidden)
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])


def test_float32_model_is_differentiable(tmp_path):
    """Gradients agree with finite differences and reach all weights but the indexer's."""
    write_checkpoint(tmp_path / "m", second_geometry_config(), seed=3, quantized=False)
    weights = tmp_path / "m" / "model.safetensors"
    save_file({name: t.float() for name, t in load_file(weights).items()}, weights)
    run = load_run(tmp_path / "m", "ideal", strict=False, max_len=64)
    ids, leaves = prompt(run, 40), float_leaves(run)
    loss_of(run, ids).backward()
    silent = {
        name for name, leaf in leaves.items() if leaf.grad is None or not leaf.grad.abs().sum() > 0
    }
    unused = ("indexer", "index_wk", "index_norm", "bias", "drafter", "engram.table")
    assert not {name for name in silent if not any(word in name for word in unused)}
    generator = torch.Generator().manual_seed(1)
    source = run.config.kv_source_layer_ids[0]
    steps = {  # relative sizes, small enough to flip no selection and no route
        f"{source}.compressor.wkv.payload": 3e-4,
        f"{source}.attention.sink": 1e-2,
        "0.attn_mix.fn": 3e-4,
        "1.moe.experts.w2.payload": 3e-4,
    }
    for name, size in steps.items():
        leaf = leaves[f".layers.{name}"]
        direction = torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        slope = (leaf.grad.double() * direction.double()).sum().item()
        step = size * leaf.detach().abs().mean().item()
        with torch.no_grad():
            leaf += step * direction
            up = loss_of(run, ids).item()
            leaf -= 2 * step * direction
            down = loss_of(run, ids).item()
            leaf += step * direction
        assert (up - down) / (2 * step) == pytest.approx(slope, rel=0.1, abs=1e-3), name


def test_code_that_runs_the_model_holds_no_released_dimension():
    """Layer numbers, counts and widths of the release stand in config.json alone."""
    root = Path(deepinfer_core.__file__).parent
    released = {
        5120,
        1280,
        512,
        2304,
        384,
        40,
        128,
        129280,
        20480,
        160000,
        10000,
        2048,
        16000000,
        1048576,
    }
    found = []
    for path in [*root.glob("model/*.py"), *root.glob("cpu/**/*.py"), *root.glob("engine/*.py")]:
        source = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.S)
        for number in re.findall(r"(?<![\w.])(\d+)(?![\w.])", source):
            if int(number) in released:
                found.append((str(path.relative_to(root)), int(number)))
    assert not found


def test_config_of_the_second_geometry_differs_from_the_goldens_everywhere(second):
    config = ModelConfig.from_folder(second)
    golden = ModelConfig.from_folder(
        Path(__file__).parents[3] / "tests" / "conformance" / "model" / "tiny_a"
    )
    names = "kv_source_layer_ids engram_layer_ids engram_max_ngram_size num_nextn_predict_layers"
    for name in f"{names} dspark_block_size sliding_window num_attention_heads hc_mult".split():
        assert getattr(config, name) != getattr(golden, name), name


def test_backend_names_the_modes_it_has():
    from deepinfer_core.errors import Unsupported

    with pytest.raises(Unsupported, match=r"'int8'.*ideal, cache, release"):
        CpuBackend("int8")


def block_kv(run: ModelRun) -> list[torch.Tensor]:
    return [s.data.clone() for sources in run.state.blocks.values() for s in sources.values()]


@pytest.mark.parametrize("numerics", ["ideal", "release"])
def test_decoder_replay_changes_late_windows_and_nothing_else(folder, numerics):
    """Up to the last KV source all is exact; above it only windows that the tail cuts differ."""
    exact, run = load_run(folder, numerics), load_run(folder, numerics)
    config, ids = run.config, prompt(run, 120)
    tail = 120 - config.sliding_window
    exact.forward(ids)
    run.forward(ids, tail_start=tail)
    for found, wanted in zip(block_kv(run), block_kv(exact), strict=True):
        assert torch.equal(found, wanted)
    for role in config.layers:
        layer = role.layer_id
        found, wanted = run.tap["hidden", layer], exact.tap["hidden", layer]
        if layer < config.last_kv_source:
            assert torch.equal(found, wanted), layer
        elif layer == config.last_kv_source:
            assert torch.equal(found, wanted[tail:]), layer
            assert torch.equal(run.tap["picks", layer], exact.tap["picks", layer][tail:])
        elif layer == config.last_kv_source + 1:
            assert torch.equal(found[-1], wanted[-1]), "the last row sees its whole window"
            assert not torch.equal(found[0], wanted[tail]), "the first one sees itself alone"
    if config.candidate_source_layer_id is not None:
        source = config.candidate_source_layer_id
        kept = slice(tail if source == config.last_kv_source else 0, None)
        assert torch.equal(run.tap["candidates", source], exact.tap["candidates", source][kept])


@pytest.mark.parametrize("numerics", ["ideal", "release"])
def test_encoder_replay_is_exact_where_windows_reach_no_further_back(folder, numerics):
    """After a hit, layer 0 of what follows is exact; deeper layers inherit shortened windows."""
    exact, run = load_run(folder, numerics), load_run(folder, numerics, num_slots=2)
    ids, hit = prompt(run, 120), 80
    replayed = hit - run.config.sliding_window
    exact.forward(ids)
    run.forward(ids[:hit])
    for table in run.state.tables.values():
        table[1] = table[0]
    if run.model.engram is not None:
        before = ids[max(0, replayed - run.config.engram_max_ngram_size + 1) : replayed]
        run.state.set_history(1, replayed, run.model.engram.folded(before, None))
    run.tap = Recorder()
    kept = block_kv(run)
    floors = {"slot": 1, "window_floor": replayed, "write_floor": hit}
    run.forward(ids[replayed:hit], start=replayed, **floors)
    assert all(torch.equal(a, b) for a, b in zip(block_kv(run), kept, strict=True))
    run.forward(ids[hit:], start=hit, **floors)
    size = run.config.sliding_window
    assert torch.equal(run.tap["hidden", 0][size:], exact.tap["hidden", 0][hit:])
    last = run.config.num_hidden_layers - 1
    assert not torch.equal(run.tap["hidden", last][size:], exact.tap["hidden", last][hit:])


def test_experts_of_several_ranks_add_up(second):
    """Each rank reads its own experts; logical ids find them in the rank's slots."""
    config = ModelConfig.from_folder(second)
    backend = CpuBackend("ideal")
    x = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(
        0, config.n_routed_experts, (9, 2), generator=torch.Generator().manual_seed(1)
    )
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
    layer = config.num_hidden_layers - 1

    def partial(expert_ids):
        with Checkpoint.open(second, config) as checkpoint:
            moe = load_weights(checkpoint, config, backend, expert_ids=expert_ids).layers[layer].moe
        slots = ids.int() if moe.slots is None else moe.slots[ids]
        count = config.n_routed_experts if expert_ids is None else len(expert_ids(layer))
        assert moe.experts.w1.payload.shape[0] == count
        return backend.experts(x, slots, weights, moe.experts, limit=config.swiglu_limit)

    every = range(config.n_routed_experts)
    parts = partial(lambda _: list(every)[::-2]) + partial(lambda _: list(every)[-2::-2])
    assert torch.allclose(parts, partial(None), atol=1e-6)
