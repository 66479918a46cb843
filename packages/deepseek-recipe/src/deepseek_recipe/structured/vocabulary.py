"""`TokenVocabulary`: the tokens of a checkpoint, as the mask engine needs them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLExecutor, LLTokenizer

from deepseek_recipe.encoding.profile import V4
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import TokenizerError, shown
from deepseek_recipe.structured.cache import BoundedCache

if TYPE_CHECKING:
    from deepseek_recipe.structured.grammar import Grammar

__all__ = ["TokenVocabulary"]

# Cached grammars of one vocabulary: entries, and characters of their constraints.
_MAX_GRAMMARS = 512
_MAX_CHARS = 16_000_000


class TokenVocabulary:
    """A tokenizer's vocabulary, with the grammars that were compiled for it.

    Text of a grammar never comes to an added token: the engine knows those by their ids alone, and
    of them a grammar allows only the end-of-sequence ids. May be used from several threads.

    Attributes:
        size: number above the largest id; a mask has one bit for each.
        num_words: words of 32 bits that a mask has.
        eos_ids: ids that end a text.
        special_ids: ids of all added tokens.
        engine: the same vocabulary as the mask engine has it.
        grammars: what was compiled, bounded; `structured.grammar.compile` uses it.
    """

    def __init__(self, path: Path, eos_ids: Sequence[int] | None, num_threads: int | None) -> None:
        """Read a tokenizer.json; `of` says what the arguments are and what is raised."""
        # Checks the file, and says what is wrong with it in our own words.
        self._tokenizer = tokenizer = PromptTokenizer.from_path(path)
        self.size = tokenizer.vocab_size
        self.num_words = (self.size + 31) // 32
        self.special_ids = frozenset(tokenizer.special_tokens)
        if eos_ids is None:
            eos_ids = (tokenizer.special_id(V4.tokens.eos),)
        self.eos_ids = tuple(eos_ids)
        for token_id in self.eos_ids:
            if isinstance(token_id, bool) or token_id not in self.special_ids:
                raise TokenizerError(
                    f"The end-of-sequence id {shown(token_id)} is no added token of `{path}`. "
                    f"Allowed: the ids of its {len(self.special_ids)} added tokens."
                )
        if not self.eos_ids:
            raise TokenizerError("`eos_ids` is empty, so that no text could end. Name one id.")
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self.engine = LLTokenizer(_engine_text(file), eos_token=list(self.eos_ids))
        except ValueError as error:
            raise TokenizerError(
                f"The mask engine cannot read `{file}`: {error}. Use the checkpoint's own file."
            ) from error
        if self.engine.vocab_size != self.size:
            raise TokenizerError(
                f"The mask engine reads {self.engine.vocab_size} tokens in `{file}`, not "
                f"{self.size}: its ids have gaps. Use the checkpoint's own file."
            )
        self._num_threads = num_threads
        self.grammars: BoundedCache[tuple[str, str], Grammar] = BoundedCache(
            _MAX_GRAMMARS, _MAX_CHARS
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, of an added token those of its spelling."""
        return self._tokenizer.token_bytes(token_id)

    @cached_property
    def executor(self) -> LLExecutor:
        """Native threads of `fill_batch`, started when first used: they do not survive a fork."""
        return LLExecutor(self._num_threads)

    @classmethod
    def of(
        cls,
        tokenizer_file: str | Path,
        *,
        eos_ids: Sequence[int] | None = None,
        num_threads: int | None = None,
    ) -> TokenVocabulary:
        """Return the vocabulary of a tokenizer.json, or of a folder that holds one.

        Takes about 1.5 s for 129,280 tokens: keep it.

        Args:
            tokenizer_file: the file's place.
            eos_ids: added tokens that end a text; None is the one that DeepSeek V4 uses.
            num_threads: of `fill_batch`; None is four fifths of the cores, 32 at most.

        Raises:
            TokenizerError: the file cannot be read or holds no byte-level BPE vocabulary, or an
                end-of-sequence id is no added token.
        """
        if num_threads is not None and (
            isinstance(num_threads, bool) or not 1 <= num_threads <= 1024
        ):
            raise TokenizerError(f"`num_threads` is {shown(num_threads)}; allowed: 1 to 1024.")
        return cls(Path(tokenizer_file), eos_ids, num_threads)


def _engine_text(file: Path) -> str:
    """Return the file with spellings of added tokens that no text can have.

    The engine runs forced text through the file's tokenizer, which takes the spelling of an added
    token for the token. So each gets a spelling that nobody can guess.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    secret = secrets.token_hex(16)
    entries: dict[str, int] = content["model"]["vocab"]
    for token in content["added_tokens"]:
        spelling = f"{secret}-{token['id']}"
        if entries.get(token["content"]) == token["id"]:
            del entries[token["content"]]
            entries[spelling] = token["id"]
        token |= {
            "content": spelling,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
    content |= {"post_processor": None, "truncation": None, "padding": None}
    return json.dumps(content, ensure_ascii=False)
