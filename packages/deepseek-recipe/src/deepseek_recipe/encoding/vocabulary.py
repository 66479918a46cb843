"""A tokenizer.json, read and checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_recipe.encoding.cut import can_cut
from deepseek_recipe.errors import TokenizerError, shown

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

__all__ = ["Vocabulary"]


class Vocabulary:
    """A byte-level BPE vocabulary with its added tokens.

    Attributes:
        spellings: id -> spelling of every added token, renamed as the token map says.
        can_cut: the rules of `cut` hold for it.
    """

    def __init__(self, path: Path, token_map: Mapping[str, int]) -> None:
        """Read and check a file.

        Raises:
            TokenizerError: see `PromptTokenizer.from_path`.
        """
        self._path = path
        tokenizer = _read(path)
        # Of the file only the parts that say which ids a text has; no truncation, no padding,
        # nothing that a post-processor adds.
        self._model = tokenizer.model
        self._normalizer = tokenizer.normalizer
        self._pre_tokenizer = tokenizer.pre_tokenizer
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.spellings = {token_id: token.content for token_id, token in self._added.items()}
        self._rename(token_map)
        self.can_cut = can_cut(self._pre_tokenizer, self._normalizer)
        self._check_out_of_reach()

    @cached_property
    def size(self) -> int:
        """Number above the largest id."""
        entries = self.plain().get_vocab(with_added_tokens=False)
        return 1 + max(max(entries.values(), default=-1), *self.spellings, -1)

    def entry(self, token_id: int) -> str | None:
        """Return what the BPE model has at an id, in its byte alphabet."""
        # the library raises on ids that are no unsigned 32-bit numbers
        return self._model.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def plain(self) -> Tokenizer:
        """Return a tokenizer that knows no added tokens."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer(self._model)
        tokenizer.pre_tokenizer = self._pre_tokenizer
        if self._normalizer is not None:
            tokenizer.normalizer = self._normalizer
        return tokenizer

    def full(self) -> Tokenizer:
        """Return a tokenizer that takes every spelling of an added token for one token.

        Its ids of added tokens are not the file's; how many tokens a text is does not depend on it.
        """
        from tokenizers import AddedToken

        tokenizer = self.plain()
        tokenizer.add_tokens(
            [
                AddedToken(
                    self.spellings[token_id],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for token_id, token in sorted(self._added.items())
            ]
        )
        return tokenizer

    def missing(self, spelling: str) -> str:
        """Return the message for a special token that is not there."""
        names = list(self.spellings.values())
        near = difflib.get_close_matches(spelling, names, n=3, cutoff=0.5) or names[:3]
        shown_names = ", ".join(map(repr, near)) or "none"
        return (
            f"The tokenizer file `{self._path}` has no special token {spelling!r} among its "
            f"{len(names)} added tokens (nearest: {shown_names}). Use the checkpoint's own file, "
            f"or say which added token it is with a token map: {{{spelling!r}: ID}}."
        )

    def _rename(self, token_map: Mapping[str, int]) -> None:
        for spelling, token_id in token_map.items():
            if isinstance(token_id, bool) or token_id not in self._added:
                raise TokenizerError(
                    f"The token map gives {spelling!r} the id {shown(token_id)}, which is no added "
                    f"token of `{self._path}`. Only its {len(self._added)} added tokens can get "
                    "another spelling."
                )
            self.spellings[token_id] = spelling
        seen: dict[str, int] = {}
        for token_id, spelling in self.spellings.items():
            if not spelling:
                raise TokenizerError(f"The added token {token_id} has an empty spelling.")
            if seen.setdefault(spelling, token_id) != token_id:
                raise TokenizerError(
                    f"With this token map {spelling!r} is the spelling of both "
                    f"{seen[spelling]} and {token_id} of `{self._path}`. Give the other one "
                    "another spelling in the map."
                )
        if len(set(token_map.values())) < len(token_map):
            raise TokenizerError("The token map gives two spellings to one id. Keep one of them.")

    def _check_out_of_reach(self) -> None:
        # A BPE model can hold an added token's spelling among its own entries. DeepSeek's does for
        # three, written so that no text comes to them; another file may not be so careful.
        plain = self.plain()
        inside = [
            spelling
            for token_id, spelling in self.spellings.items()
            if self._model.token_to_id(spelling) == token_id
        ]
        for spelling in inside:
            ids = plain.encode(spelling, add_special_tokens=False).ids
            if self._model.token_to_id(spelling) in ids:
                raise TokenizerError(
                    f"In `{self._path}` ordinary text comes to the added token {spelling!r}: it is "
                    "an entry of the BPE model too. Take it out of `model.vocab`."
                )


def _read(path: Path) -> Tokenizer:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"The tokenizer file `{path}` cannot be read: {error.strerror}. "
            "Name a tokenizer.json, or a folder that holds one."
        ) from error
    # Here, because loading this library takes longer than all of ours.
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except ValueError as error:
        raise TokenizerError(
            f"`{path}` is no tokenizer.json: {error}. Use the file of the model's folder."
        ) from error
    if not isinstance(tokenizer.model, BPE):
        raise TokenizerError(
            f"`{path}` holds a {type(tokenizer.model).__name__} model; allowed: BPE. "
            "Use the checkpoint's own tokenizer."
        )
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or b'"ByteLevel"' not in pre_tokenizer.__getstate__():
        raise TokenizerError(
            f"The vocabulary in `{path}` is not byte-level: its pre-tokenizer has no step "
            "`ByteLevel`, so ids cannot become bytes. Use the checkpoint's own tokenizer."
        )
    return tokenizer
