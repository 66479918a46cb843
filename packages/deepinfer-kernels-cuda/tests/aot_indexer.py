"""Index scores and selection at the released sizes."""

from deepinfer_kernels_cuda.attention import index_scores, select
from deepinfer_kernels_cuda.testing.aot import AotCase

SCORE = {
    "q_ptr": "*bf16",
    "w_ptr": "*bf16",
    "byte_ptr": "*u8",
    "word_ptr": "*i32",
    "table_ptr": "*i32",
    "position_ptr": "*i64",
    "sequence_ptr": "*i64",
    "slot_ptr": "*i64",
    "candidate_ptr": "*i32",
    "first_ptr": "*i32",
    "entry_ptr": "*i16",
    "block_ptr": "*i16",
    "num_rows": "i32",
    "most": "i32",
    "table_stride": "i32",
    "capacity": "i32",
    "num_candidates": "i32",
}


def _score(name, rows, keys, mode, per_block, ratio=1, registers=None):
    """A form of `score_plan`, which takes the joined product on Blackwell."""
    constexprs = {
        "RATIO": ratio,
        "CHANNELS": 128,
        "HEADS": 32,
        "HEAD_PAD": 32,
        "WORDS": 16,
        "WORD_PAD": 16,
        "WIDTH": 68,
        "PER_BLOCK": per_block,
        "CANDIDATE": 8,
        "ROWS": rows,
        "KEYS": keys,
        "MODE": mode,
        "ALIGNED": True,
        "JOINED": False,
        "TILES": 8 // rows,
        "STAGES": 3,
    }
    return AotCase(
        name,
        index_scores._score_kernel,
        SCORE,
        constexprs,
        ("capacity",),
        {"num_warps": 4} | ({"maxnreg": registers} if registers else {}),
        by_capability={100: {"JOINED": True}},
    )


def _choose(name, top_k, units, listed, blocks, warps):
    padded = top_k
    constexprs = {
        "RATIO": 1,
        "TOP_K": top_k,
        "PADDED": padded,
        "CANDIDATE": 8,
        "UNIT": 64 if blocks else 128,
        "UNITS": units,
        "IN_BLOCKS": min(padded, units) * (8 if blocks else 16),
        "LISTED": listed,
        "BLOCKS": blocks,
    }
    signature = {
        "entry_ptr": "*i16",
        "block_ptr": "*i16",
        "unit_ptr": "*i16",
        "sequence_ptr": "*i64",
        "position_ptr": "*i64",
        "candidate_ptr": "*i32",
        "list_ptr": "*i32",
        "out_ptr": "*i32",
        "capacity": "i32",
        "num_candidates": "i32",
    }
    return AotCase(
        name,
        select._select_kernel,
        signature,
        constexprs,
        ("capacity",),
        {"num_warps": warps},
    )


CASES = [
    _score("scores of one row", 1, 128, 1, 128, registers=128),
    _score("scores of two rows", 2, 128, 1, 128),
    _score("scores of four rows", 4, 64, 1, 64, ratio=2),
    _score("scores of one row, tiny blocks", 1, 64, 0, 16, registers=128),
    _score("scores of candidates", 1, 128, 2, 128, registers=128),
    AotCase(
        "tiles of rows",
        index_scores._plan_kernel,
        {
            "sequence_ptr": "*i64",
            "first_ptr": "*i32",
            "num_rows": "i32",
            "num_tiles": "i32",
            "tile": "i32",
        },
        {"BLOCK": 1024},
        (),
        {"num_warps": 4},
    ),
    AotCase(
        "best of units",
        select._unit_kernel,
        {
            "block_ptr": "*i16",
            "unit_ptr": "*i16",
            "sequence_ptr": "*i64",
            "position_ptr": "*i64",
            "num_units": "i32",
            "num_candidates": "i32",
        },
        {"RATIO": 1, "CANDIDATE": 8, "IN_UNIT": 16, "UNITS": 256, "LISTED": False},
        (),
        {"num_warps": 4},
    ),
    _choose("picks of 64k entries", 512, 512, False, False, 8),
    _choose("picks of a million entries", 512, 8192, False, False, 8),
    _choose("picks of candidates", 512, 128, True, False, 4),
    _choose("candidates of 64k entries", 2048, 1024, False, True, 8),
    _choose("candidates of a million entries", 2048, 16384, False, True, 16),
]
