"""Texts, images and documents of content blocks to pieces of a conversation's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain, groupby

from deepseek_recipe.conversation import Content, ImageSource
from deepseek_recipe.encoding.profile import JOINER, UNSUPPORTED_IMAGE, Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.protocols.images import check_base64
from deepseek_recipe.protocols.messages.blocks import (
    Base64Image,
    DocumentBlock,
    FileImage,
    ImageBlock,
    TextBlock,
)

__all__ = ["block_piece", "joined", "merged"]

_WEB_URL = re.compile(r"https?://", re.IGNORECASE)
_SHOWN_URL_LEN = 200


def block_piece(
    block: TextBlock | ImageBlock | DocumentBlock, profile: Profile, path: str
) -> str | ImageSource:
    """Return what stands for one block.

    Args:
        path: place of the block, for messages about it.

    Raises:
        ConversionError: an image that the checkpoint would see is not one.
    """
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        return f"[Unsupported document type: {block.source.media_type or 'unknown'}]"
    if not profile.vision:
        return UNSUPPORTED_IMAGE
    return _image(block, path)


def _image(block: ImageBlock, path: str) -> ImageSource:
    source = block.source
    if isinstance(source, Base64Image):
        check_base64(source.data, f"{path}: ")
        url = f"data:{source.media_type};base64,{source.data}"
        return ImageSource(kind="data_url", url=url, detail="high", path=path)
    if isinstance(source, FileImage):
        raise ConversionError(
            f"{path}: file_id is not supported. Pass the image as a base64 data url instead."
        )
    if not _WEB_URL.match(source.url):
        url = json.dumps(source.url[:_SHOWN_URL_LEN], ensure_ascii=False)
        raise ConversionError(f"{path}: invalid url: {url}")
    return ImageSource(kind="url", url=source.url, detail="high", path=path)


def joined(pieces: list[str | ImageSource]) -> Content:
    """Return the content whose parts are `pieces`, empty ones included."""
    with_joiners = chain.from_iterable((JOINER, piece) for piece in pieces)
    return merged(list(with_joiners)[1:])


def merged(pieces: Iterable[str | ImageSource]) -> Content:
    """Return the content in which `pieces` follow one another, neighbouring texts as one."""
    content: list[str | ImageSource] = []
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if is_text:
            content.append("".join(piece for piece in group if isinstance(piece, str)))
        else:
            content.extend(group)
    return tuple(content)
