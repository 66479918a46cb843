"""Text to ids and back, by the `tokenizer.json` of a model folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from deepinfer_core.errors import CheckpointError, RequestError

__all__ = ["TextCodec", "TextDecoder"]

# A character has at most four bytes. When so many tokens have not completed one, some of them are
# no characters at all, and those can be settled: what is decoded anew with each token stays short.
_MAX_PENDING = 32
_MAX_CHARACTER = 4


class TextCodec:
    """The tokenizer of a model folder; a folder without one serves token ids only.

    Text never becomes a control token: `<eos>` in a text is encoded as five characters.
    """

    def __init__(self, folder: Path) -> None:
        """Read the file.

        Raises:
            CheckpointError: it is there but is no tokenizer.
        """
        self.tokenizer: Tokenizer | None = None
        self._encoder: Tokenizer | None = None
        self._special: frozenset[int] = frozenset()
        file = folder / "tokenizer.json"
        if not file.exists():
            return
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            self.tokenizer = Tokenizer.from_str(json.dumps(content))
            for token in content.get("added_tokens", ()):
                token["special"] = True  # some control tokens are not marked as such
            self._encoder = Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the parser raises no narrower type
            raise CheckpointError(
                f"`{file}` is not a tokenizer: {error}. Fetch it again, or remove it to use token "
                "ids only."
            ) from error
        added = self.tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)
        self._encoder.encode_special_tokens = True
        self._encoder.no_truncation()
        self._encoder.no_padding()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            RequestError: there is no tokenizer, or the text is not valid Unicode.
        """
        if self._encoder is None:
            raise _absent("text cannot be encoded. Give `prompt_token_ids`")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"`prompt` has half of a surrogate pair at character {error.start}; it must be "
                "valid Unicode.",
                param="prompt",
            ) from error
        ids: list[int] = self._encoder.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out.

        Raises:
            RequestError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise _absent("ids have no text. Use the ids")
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decoder(self) -> TextDecoder | None:
        """Return what makes text of one request's ids, or None without a tokenizer."""
        return None if self.tokenizer is None else TextDecoder(self.tokenizer, self._special)


class TextDecoder:
    """Ids to text, one at a time, never half a character. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        """Start a text; `special` are the ids without one."""
        self._tokenizer = tokenizer
        self._special = special
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # ids with text since the last complete character
        self._ids: list[int] = []
        self._len = 0  # characters handed out

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Take the next id.

        Returns:
            The text that is certain now, and whether it is all of the text of the ids so far.
        """
        self._ids.append(token_id)
        if token_id in self._special or self._tokenizer.id_to_token(token_id) is None:
            return "", not self._pending
        self._pending.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        if piece is not None:
            self._pending.clear()
        elif len(self._pending) >= _MAX_PENDING:
            piece = self._settle()
        self._len += len(piece or "")
        return piece or "", not self._pending

    def flush(self) -> str:
        """Return what was held back; with it all pieces together equal decoding all ids at once."""
        return self._decode(self._ids)[self._len :]

    def _settle(self) -> str:
        """Give up on what cannot become a character any more; return its text.

        Cuts where the text of both sides, decoded apart, is that of all: not inside a character.
        """
        pending = self._pending
        whole = self._decode(pending)
        for cut in range(len(pending) - 2 * _MAX_CHARACTER, len(pending) - _MAX_CHARACTER):
            head, rest = self._decode(pending[:cut]), self._decode(pending[cut:])
            if head + rest == whole and len(rest) >= _MAX_CHARACTER:
                self._stream = DecodeStream(skip_special_tokens=True)
                self._pending = pending[cut:]
                for token_id in self._pending:
                    self._stream.step(self._tokenizer, token_id)
                return head
        return ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _absent(consequence: str) -> RequestError:
    return RequestError(
        f"The model folder has no tokenizer.json, so {consequence}, or put the file there.",
        param="prompt",
        code="no_tokenizer",
    )
