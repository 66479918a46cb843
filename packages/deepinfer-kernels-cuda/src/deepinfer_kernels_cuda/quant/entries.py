"""Packed cache entries: encode, decode, round to what a store keeps.

    kind        payload                              scales                       512 channels
    window      E4M3, a byte a channel               UE8M0, one for 32 channels   512 + 16 bytes
    compressed  E2M1, low nibble = even channel      E4M3, one for 16 channels    256 + 32 bytes
    index       E2M1, low nibble = even channel      UE8M0, one for 32 channels   (128) 64 + 4 bytes

Payload bytes come first, then scale bytes. A NaN or an infinity makes its group's scale NaN, but
for infinities of `compressed`, whose scale saturates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import (
    INTERPRET,
    INVERSE_448,
    as_bf16,
    as_e4m3,
    ceil_ue8m0,
    e2m1_code,
    e2m1_value,
    ue8m0_value,
)

__all__ = [
    "COMPRESSED",
    "GROUP",
    "INDEX",
    "KINDS",
    "WINDOW",
    "decode_e2m1",
    "decode_e4m3",
    "decode_entry",
    "encode_entry",
    "encode_groups",
    "entry_width",
    "load_groups",
    "round_entry",
    "scale_of_byte",
    "store_entries",
]

# Kinds as kernels know them.
WINDOW = tl.constexpr(0)
COMPRESSED = tl.constexpr(1)
INDEX = tl.constexpr(2)
KINDS = {"window": 0, "compressed": 1, "index": 2}
GROUP = {"window": 32, "compressed": 16, "index": 32}

_BITS_OF_1E_4 = tl.constexpr(0x38D1B717)
_BITS_OF_6_EXP_9 = tl.constexpr(0x3C400000)  # 6 * 2^-9
_BITS_OF_6_EXP_126 = tl.constexpr(0x01C00000)  # 6 * 2^-126


@triton.jit
def _max_magnitude(x, axis: tl.constexpr, floor_bits: tl.constexpr):
    """Return max(|x|, floor) along an axis, float32; NaN and infinity win over numbers."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(tl.max(bits, axis=axis), floor_bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_byte(scale_byte, KIND: tl.constexpr):
    """Return the float32 value of a kind's scale bytes (uint8)."""
    if KIND == COMPRESSED:
        return _e4m3_of_byte(scale_byte)
    else:
        return ue8m0_value(scale_byte)


@triton.jit
def encode_groups(x, KIND: tl.constexpr):
    """Scale and round float32 groups x [n, g, group].

    Returns (codes, scale bytes uint8 [n, g]): codes are E4M3 bytes (uint8) of `window`, else 4-bit
    integers (int32).
    """
    if KIND == WINDOW:
        exponent = ceil_ue8m0(_max_magnitude(x, 2, _BITS_OF_1E_4) * INVERSE_448)
        scaled = x * _inverse_power(exponent)[:, :, None]
        return as_e4m3(scaled).to(tl.uint8, bitcast=True), exponent.to(tl.uint8)
    elif KIND == COMPRESSED:
        raw = tl.div_rn(_max_magnitude(x, 2, _BITS_OF_6_EXP_9), 6.0)
        stored = as_e4m3(raw)
        scale = _e4m3_of_byte(stored.to(tl.uint8, bitcast=True))
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape))
        return e2m1_code(scaled), stored.to(tl.uint8, bitcast=True)
    else:
        exponent = ceil_ue8m0(tl.div_rn(_max_magnitude(x, 2, _BITS_OF_6_EXP_126), 6.0))
        scaled = x * _inverse_power(exponent)[:, :, None]
        return e2m1_code(scaled), exponent.to(tl.uint8)


@triton.jit
def _inverse_power(exponent):
    """Return 2^(127 - e) of UE8M0 bytes 0 < e < 254, NaN of 255."""
    return ue8m0_value(tl.where(exponent == 255, 255, 254 - exponent))


@triton.jit
def _e4m3_of_byte(byte):
    value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRET:  # its conversion takes NaN for 480
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def decode_e4m3(payload, scale):
    """Return E4M3 bytes (uint8) times float32 scales of the same shape, float32 (exact)."""
    return _e4m3_of_byte(payload) * scale


@triton.jit
def decode_e2m1(packed, scale):
    """Return (even, odd) channels of packed bytes (uint8), times scales of their shape, float32."""
    wide = packed.to(tl.int32)
    return e2m1_value(wide & 0xF) * scale, e2m1_value(wide >> 4) * scale


@triton.jit
def store_entries(
    base, x, mask, KIND: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr
):
    """Pack float32 groups x [n, G, SIZE] into entries that start at pointers base [n] (uint8).

    mask [n] tells which to write. G * SIZE may be more than CHANNELS.
    """
    g = tl.arange(0, G)
    codes, scale_byte = encode_groups(x, KIND)
    row = mask[:, None] & (g * SIZE < CHANNELS)[None, :]
    if KIND == WINDOW:
        place = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(base[:, None, None] + place[None, :, :], codes, mask=row[:, :, None])
        tl.store(base[:, None] + CHANNELS + g[None, :], scale_byte, mask=row)
    else:
        low, high = tl.split(tl.reshape(codes, [codes.shape[0], G, SIZE // 2, 2]))
        place = g[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(base[:, None, None] + place[None, :, :], packed, mask=row[:, :, None])
        tl.store(base[:, None] + CHANNELS // 2 + g[None, :], scale_byte, mask=row)


def entry_width(kind: str, channels: int) -> int:
    """Return the bytes of a packed entry: 528, 288, 68 for the released sizes."""
    check_value("kind", kind, kind in KINDS, f"one of {sorted(KINDS)}")
    group = GROUP[kind]
    needs = f"a multiple of {group}, which share a scale"
    check_value("channels", channels, channels % group == 0, needs)
    return (channels if kind == "window" else channels // 2) + channels // group


def encode_entry(kind: str, x: Tensor) -> Tensor:
    """Pack vectors into cache entries, with the bits a store keeps.

    Args:
        kind: `window`, `compressed` or `index`.
        x: [..., d] bfloat16 or float32, contiguous.
    Returns:
        uint8 [..., entry_width(kind, d)].
    Source: reference.entries.encode_entry; model-v41.md 10.
    """
    check_tensor("x", x, dtype=(torch.bfloat16, torch.float32))
    channels = x.shape[-1]
    width = entry_width(kind, channels)
    out = torch.empty(*x.shape[:-1], width, dtype=torch.uint8, device=x.device)
    num_rows = x.numel() // channels if channels else 0
    if num_rows:
        groups, rows = _tile(kind, channels)
        _encode_kernel[(triton.cdiv(num_rows, rows),)](
            x, out, num_rows, KINDS[kind], channels, groups, GROUP[kind], width, rows, num_warps=4
        )
    return out


def decode_entry(kind: str, entry: Tensor, channels: int) -> Tensor:
    """Unpack cache entries: uint8 [..., entry_width(kind, channels)] -> float32 [..., channels].

    Source: reference.entries.decode_entry; model-v41.md 10.
    """
    width = entry_width(kind, channels)
    check_tensor("entry", entry, dtype=torch.uint8)
    needs = f"{width}, the bytes of an entry of {channels} channels"
    check_value("entry's last dimension", entry.shape[-1], entry.shape[-1] == width, needs)
    out = torch.empty(*entry.shape[:-1], channels, dtype=torch.float32, device=entry.device)
    num_rows = entry.numel() // width
    if num_rows:
        groups, rows = _tile(kind, channels)
        _decode_kernel[(triton.cdiv(num_rows, rows),)](
            entry, out, num_rows, KINDS[kind], channels, groups, GROUP[kind], width, rows,
            num_warps=4,
        )  # fmt: skip
    return out


def round_entry(kind: str, x: Tensor) -> Tensor:
    """Return vectors as they read back from a packed entry.

    `round_window` (keys [B, d]) and `round_index` (queries [B, H, d]) of a backend.

    Args:
        kind: `window`, `compressed` or `index`.
        x: [..., d] bfloat16, contiguous.
    Returns:
        The same shape, bfloat16; every value of the formats is one of bfloat16 too.
    Source: reference.entries.round_entry; model-v41.md 10.
    """
    check_tensor("x", x, dtype=torch.bfloat16)
    channels = x.shape[-1]
    entry_width(kind, channels)
    out = torch.empty_like(x)
    num_rows = x.numel() // channels if channels else 0
    if num_rows:
        groups, rows = _tile(kind, channels)
        _round_kernel[(triton.cdiv(num_rows, rows),)](
            x, out, num_rows, KINDS[kind], channels, groups, GROUP[kind], rows, num_warps=4
        )
    return out


def _tile(kind: str, channels: int) -> tuple[int, int]:
    """Return (groups, rows) of a program: about 4096 values, so that decode fills the device."""
    groups = triton.next_power_of_2(channels // GROUP[kind])
    return groups, max(1, 2048 // (groups * GROUP[kind]))


@triton.jit
def load_groups(x_ptr, row, mask, CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr):
    """Return rows x [n, CHANNELS] as float32 groups [n, G, SIZE], zero where there is none."""
    g = tl.arange(0, G)
    place = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = mask[:, None, None] & (g * SIZE < CHANNELS)[None, :, None]
    at = row.to(tl.int64)[:, None, None] * CHANNELS + place[None, :, :]
    return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _encode_kernel(
    x_ptr, out_ptr, num_rows,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    x = load_groups(x_ptr, row, mask, CHANNELS, G, SIZE)
    store_entries(out_ptr + row.to(tl.int64) * WIDTH, x, mask, KIND, CHANNELS, G, SIZE)


@triton.jit
def _decode_kernel(
    entry_ptr, out_ptr, num_rows,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.arange(0, G)
    there = (row < num_rows)[:, None] & (g * SIZE < CHANNELS)[None, :]
    entry = entry_ptr + row.to(tl.int64)[:, None] * WIDTH
    out = out_ptr + row.to(tl.int64)[:, None, None] * CHANNELS
    if KIND == WINDOW:
        scale = scale_of_byte(tl.load(entry + CHANNELS + g[None, :], mask=there, other=0), KIND)
        place = (g[:, None] * SIZE + tl.arange(0, SIZE)[None, :])[None, :, :]
        payload = tl.load(entry[:, :, None] + place, mask=there[:, :, None], other=0)
        tl.store(out + place, decode_e4m3(payload, scale[:, :, None]), mask=there[:, :, None])
    else:
        at = entry + CHANNELS // 2 + g[None, :]
        scale = scale_of_byte(tl.load(at, mask=there, other=0), KIND)
        place = (g[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :])[None, :, :]
        packed = tl.load(entry[:, :, None] + place, mask=there[:, :, None], other=0)
        even, odd = decode_e2m1(packed, scale[:, :, None])
        tl.store(out + 2 * place, even, mask=there[:, :, None])
        tl.store(out + 2 * place + 1, odd, mask=there[:, :, None])


@triton.jit
def _round_kernel(
    x_ptr, out_ptr, num_rows,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    x = load_groups(x_ptr, row, mask, CHANNELS, G, SIZE)
    codes, scale_byte = encode_groups(x, KIND)
    scale = scale_of_byte(scale_byte, KIND)[:, :, None]
    value = decode_e4m3(codes, scale) if KIND == WINDOW else e2m1_value(codes) * scale
    g = tl.arange(0, G)
    place = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = mask[:, None, None] & (g * SIZE < CHANNELS)[None, :, None]
    out = out_ptr + row.to(tl.int64)[:, None, None] * CHANNELS + place[None, :, :]
    tl.store(out, as_bf16(value), mask=inside)
