"""Images of a request: to a source and a placeholder, or to a plain text without vision."""

from __future__ import annotations

import re
from binascii import a2b_base64
from typing import Literal, TypeAlias
from urllib.parse import unquote

from deepseek_recipe.conversation import ImageSource
from deepseek_recipe.encoding.profile import UNSUPPORTED_IMAGE, Profile
from deepseek_recipe.errors import ConversionError

__all__ = ["ImageDetail", "check_base64", "image_piece"]

ImageDetail: TypeAlias = Literal["low", "high", "original", "auto"]

_DATA_URL = re.compile(r"\s*data:(?P<type>[^;,]*)(?:;[^,]*?)??;base64,", re.IGNORECASE)
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)
_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/gif", "image/webp"})
_WHITESPACE = str.maketrans("", "", " \t\n\f\r")


def image_piece(
    url: str, detail: str | None, *, profile: Profile, prefix: str, path: str
) -> str | ImageSource:
    """Return what stands for one image in a message's content.

    Args:
        url: a data URL, or an http(s) URL, which is not fetched and of which only the scheme is
            checked.
        detail: as sent; None is `high`.
        prefix: start of error messages, for example `.messages[0]: `.
        path: place in the request, for messages about the image later on.

    Raises:
        ConversionError: the checkpoint has vision, but the URL holds no picture it can read.
    """
    if not profile.vision:
        return UNSUPPORTED_IMAGE
    if _WEB_URL.match(url):
        return ImageSource(kind="url", url=url, detail=detail or "high", path=path)
    head = _DATA_URL.match(url)
    if head is None:
        raise ConversionError(f"{prefix}Unsupported image_url format")
    if head["type"].strip().lower() not in _TYPES:
        raise ConversionError(
            f"{prefix}You have uploaded an unsupported image. Please make sure your image is valid "
            "and has one of the following formats: webp, png, jpeg, and gif."
        )
    check_base64(url[head.end() :], prefix)
    return ImageSource(kind="data_url", url=url, detail=detail or "high", path=path)


def check_base64(data: str, prefix: str) -> None:
    """Raise ConversionError unless `data` is base64; blanks and missing padding are accepted."""
    escapes = data.count("%")
    # three characters of base64's 64 need an escape; a picture full of them would take seconds
    if escapes > 10_000 and escapes * 8 > len(data):
        raise ConversionError(f"{prefix}Invalid base64 data")
    digits = unquote(data) if escapes else data
    digits = digits.translate(_WHITESPACE)
    if not digits.endswith("="):
        digits += "=" * (-len(digits) % 4)
    try:
        a2b_base64(digits, strict_mode=True)
        whole = len(digits) % 4 == 0  # Python 3.11 lets `AAAA=` pass
    except ValueError:  # also binascii.Error, and any character beyond ASCII
        whole = False
    if not whole:
        raise ConversionError(f"{prefix}Invalid base64 data")
