"""Configurations of attention kernels that must compile, at V4.1-Flash sizes."""

from deepinfer_kernels_cuda.attention import (
    attend,
    compressor,
    entries,
    places,
    prepare,
    window,
)
from deepinfer_kernels_cuda.quant import entries as packing
from deepinfer_kernels_cuda.testing.aot import AotCase

_ROWS = {
    "sequence_ptr": "*i64",
    "position_ptr": "*i64",
    "slot_ptr": "*i64",
    "row_start_ptr": "*i64",
    "first_ptr": "*i64",
    "window_first_ptr": "*i64",
    "window_last_ptr": "*i64",
    "floor_ptr": "*i64",
    "writes_ptr": "*i1",
}
_SIZES = dict.fromkeys(
    ("num_rows", "ring_len", "per_block", "table_stride", "ratio", "depth", "row_offset",
     "num_keys"), "i32",
)  # fmt: skip
_STORES = {
    "data_ptr": "*u8",
    "ring_ptr": "*u8",
    "pool_ptr": "*u8",
    "table_ptr": "*i32",
    "picks_ptr": "*i32",
    "state_ptr": "*fp32",
}
_SIGNATURE = {
    **_ROWS, **_SIZES, **_STORES, "entry_ptr": "*u8", "x_ptr": "*bf16",
    "weight_ptr": "*bf16", "q_ptr": "*i32",
    "scale": "fp32", "sink_ptr": "*fp32", "decay_ptr": "*fp32", "inverse_ptr": "*fp32",
    "frequency_ptr": "*fp32", "place_ptr": "*i64", "packed_ptr": "*u8",
}  # fmt: skip
_KINDS = {"window": (512, 16, 32, 528, 4), "compressed": (512, 32, 16, 288, 4),
          "index": (128, 4, 32, 68, 16)}  # fmt: skip


def _packed(kind: str, kernel) -> dict[str, int]:
    channels, groups, group, width, rows = _KINDS[kind]
    sizes = {"CHANNELS": channels, "G": groups, "SIZE": group, "WIDTH": width, "ROWS": rows,
             "KIND": packing.KINDS[kind]}  # fmt: skip
    return {name: value for name, value in sizes.items() if name in kernel.arg_names}


def _attend(plan: attend.Plan, drafts: int = 0) -> list[AotCase]:
    """Cases of a plan, with 512 picks; drafts in the window leave its last chunk room for picks."""
    chunks = 10 + (drafts > 0)
    sizes = {
        "H": 64, "D": 512, "WINDOW_LEN": 128 + drafts, "PICKS": 512, "BLOCK_H": 64,
        "CHUNKS": chunks, "HEAD_BLOCKS": 1, "MIXED": drafts > 0, "WHOLE": plan.run is None,
        "WORDS": 64, "PAIRS": 32, "RING_LEN": 133, "PER_BLOCK": 128, "GROUPS": 16, "TILE": 4,
        "STEP": attend.STEP, "SHARE": plan.share, "RUN": plan.run or chunks,
        "PLACES": 64 * chunks, "BLOCK": 1024,
    }  # fmt: skip
    types = {**_SIGNATURE, "keys_ptr": "*bf16", "out_ptr": "*i32",
             "weight_ptr": "*bf16" if plan.run is None else "*fp32"}  # fmt: skip

    def case(name: str, kernel, stages: int = 1, **options: int) -> AotCase:
        own = {k: v for k, v in sizes.items() if k in kernel.arg_names}
        own |= {"STAGES": stages} if "STAGES" in kernel.arg_names else {}
        most = "more" if plan is attend.PLANS[-1] else f"up to {plan.rows}"
        title = f"attend {name}, {most} rows" + f", {drafts} drafts" * (drafts > 0)
        return AotCase(title, kernel, types, own, options=options)

    return [
        case("weights", attend._weights_kernel, plan.stages, num_warps=4, num_stages=1),
        case("sums", attend._sums_kernel, plan.sum_stages, num_warps=plan.sum_warps, num_stages=1),
        *([case("places", places._places_kernel, num_warps=4)] if plan is attend.PLANS[0] else []),
    ]


CASES = [
    *(case for plan in attend.PLANS for case in _attend(plan, 5 if plan is attend.PLANS[1] else 0)),
    AotCase("write_window", window._write_window_kernel, {**_SIGNATURE, "keys_ptr": "*bf16"},
            _packed("window", window._write_window_kernel)),
    AotCase("write_entries compressed", entries._write_entries_kernel, _SIGNATURE,
            _packed("compressed", entries._write_entries_kernel)),
    AotCase("prepare_keys", prepare._prepare_kernel,
            {**_SIGNATURE, "latent_ptr": "*bf16", "out_ptr": "*bf16", "eps": "fp32"},
            {"D": 512, "PAIRS": 32, "G": 16, "ROWS": 2, "WRITE": True}),
    AotCase("pool_groups", compressor._pool_kernel,
            {**_SIGNATURE, "values_ptr": "*fp32", "gates_ptr": "*fp32", "out_ptr": "*fp32"},
            {"CHANNELS": 512, "BLOCK": 512}),
    AotCase("round_entry index", packing._round_kernel, {**_SIGNATURE, "out_ptr": "*bf16"},
            _packed("index", packing._round_kernel)),
]  # fmt: skip
