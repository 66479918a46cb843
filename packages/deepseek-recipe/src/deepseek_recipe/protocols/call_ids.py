"""Ids of the tool calls that a reply makes."""

from __future__ import annotations

import os
import string

__all__ = ["call_id"]

_ALPHANUMERICS = string.ascii_letters + string.digits


def call_id(index: int) -> str:
    """Return a new id, `call_` + two-digit index + `_` + 20 alphanumerics + 4 digits.

    Args:
        index: of the call in its reply, from 0.
    """
    letters = "".join(_ALPHANUMERICS[byte % len(_ALPHANUMERICS)] for byte in os.urandom(20))
    number = int.from_bytes(os.urandom(4)) % 10_000
    return f"call_{index:02d}_{letters}{number:04d}"
