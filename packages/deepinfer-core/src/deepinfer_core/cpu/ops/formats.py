"""Number formats of weights, caches and activations: pack, unpack, round.

    fp8   E4M3 payload, one power-of-two scale (UE8M0 byte) for 32 channels
    fp4   E2M1 payload, two codes a byte, low nibble = even channel;
          scale UE8M0 for 32 or E4M3 for 16 channels

A scale byte e means 2^(e - 127); 255 is NaN, so a NaN in a row survives packing and is seen by the
sampler.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = [
    "decode_entry",
    "e2m1_codes",
    "e2m1_values",
    "encode_entry",
    "entry_width",
    "pack_nibbles",
    "round_fp8",
    "scale_value",
    "unpack_nibbles",
]

FP8_MAX = 448.0
FP8_INVERSE = 0.002232142857142857  # 1/448; a product with float32 rounds it to float32 first
E2M1_MAX = 6.0
GROUP = {"window": 32, "compressed": 16, "index": 32}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _powers(device: torch.device) -> Tensor:
    """Return the value of every UE8M0 byte, [256] float32."""
    return torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")], device=device)


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    """Return the value of every 4-bit code, [16] float32."""
    return torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=device)


def scale_value(exponent: Tensor) -> Tensor:
    """Return 2^(e - 127) of UE8M0 bytes as float32; 255 gives NaN."""
    return _powers(exponent.device)[exponent.int()]


def _ceil_exponent(x: Tensor) -> Tensor:
    """Return the UE8M0 byte of the smallest power of two >= x, for normal positive float32 x."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp_(max=255).to(torch.uint8)


def _groups(x: Tensor, size: int) -> Tensor:
    groups: Tensor = x.float().unflatten(-1, (-1, size))
    return groups


def _encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 payload [..., d] and UE8M0 bytes [..., d / 32]."""
    groups = _groups(x, 32)
    amax = groups.abs().amax(-1).clamp(min=1e-4)
    exponent = _ceil_exponent(amax * FP8_INVERSE)
    scaled = groups / scale_value(exponent).unsqueeze(-1)
    payload = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return payload.flatten(-2), exponent


def round_fp8(x: Tensor) -> Tensor:
    """Return x [..., d] as it reads back from fp8 with a scale for each 32 channels; float32."""
    payload, exponent = _encode_fp8(x)
    return (_groups(payload, 32) * scale_value(exponent).unsqueeze(-1)).flatten(-2)


def e2m1_codes(x: Tensor) -> Tensor:
    """Return 4-bit codes (uint8) of float32 x.

    Nearest, ties to the even code, saturating at 6, sign of zero kept.
    """
    a = x.abs()
    code = (
        (a > 0.25).to(torch.uint8)
        + (a >= 0.75)
        + (a > 1.25)
        + (a >= 1.75)
        + (a > 2.5)
        + (a >= 3.5)
        + (a > 5.0)
    )
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the float32 values of 4-bit codes."""
    return _e2m1_table(codes.device)[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return bytes [..., d / 2] of codes [..., d]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return codes [..., d] of bytes [..., d / 2]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _encode_fp4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [..., d] and scale bytes [..., d / group].

    Scales are UE8M0 for groups of 32, E4M3 for groups of 16.
    """
    groups = _groups(x, group)
    amax = groups.abs().amax(-1)
    if group == 32:
        scale_bytes = _ceil_exponent(amax.clamp(min=6 * 2.0**-126) / E2M1_MAX)
        scale = scale_value(scale_bytes)
    else:
        stored = (amax.clamp(min=6 * 2.0**-9) / E2M1_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
        scale_bytes, scale = stored.view(torch.uint8), stored.float()
    return e2m1_codes(groups / scale.unsqueeze(-1)).flatten(-2), scale_bytes


def entry_width(kind: str, channels: int) -> int:
    """Return the bytes of a packed cache entry of `channels` channels.

    528, 288, 68 for the released sizes.
    """
    payload = channels if kind == "window" else channels // 2
    return payload + channels // GROUP[kind]


def encode_entry(kind: str, x: Tensor) -> Tensor:
    """Pack x [..., d] into cache entries, uint8 [..., entry_width].

    Payload bytes come first, then scale bytes.
    """
    if kind == "window":
        payload, scale = _encode_fp8(x)
        return torch.cat((payload.view(torch.uint8), scale), dim=-1)
    codes, scale = _encode_fp4(x, GROUP[kind])
    return torch.cat((pack_nibbles(codes), scale), dim=-1)


def decode_entry(kind: str, entry: Tensor, channels: int) -> Tensor:
    """Unpack cache entries, uint8 [..., entry_width] -> float32 [..., channels]."""
    size = channels if kind == "window" else channels // 2
    payload, scale_bytes = entry[..., :size].contiguous(), entry[..., size:].contiguous()
    if kind == "window":
        values = payload.view(torch.float8_e4m3fn).float()
    else:
        values = e2m1_values(unpack_nibbles(payload))
    if kind == "compressed":
        scale = scale_bytes.view(torch.float8_e4m3fn).float()
    else:
        scale = scale_value(scale_bytes)
    scaled: Tensor = values.unflatten(-1, (-1, GROUP[kind])) * scale.unsqueeze(-1)
    return scaled.flatten(-2)
