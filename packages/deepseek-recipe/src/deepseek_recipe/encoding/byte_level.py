"""The alphabet in which byte-level BPE vocabularies are written: one character a byte."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BYTE_OF"]

# Bytes that stand for themselves, because they are visible in Latin-1; the others follow one
# another from U+0100.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _VISIBLE)

BYTE_OF: Mapping[str, int] = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)
}
