r"""Places at which one long text may be cut without changing its token ids.

Ids are made word by word: the pre-tokenizer splits the text into words, and BPE never looks beyond
one. So a cut is safe where the words of the whole are those of the left part and then those of the
right part. Of a pre-tokenizer this can only be said knowing its rules; they are those of
`KNOWN_PRE_TOKENIZER`, steps that each split the pieces of the step before, piece by piece:

    1  `\p{N}{1,3}`                       groups of digits
    2  `[K]+`                             runs of K, K being common CJK ideographs and kana
    3  `[punctuation][A-Za-z]+` | `[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+` | ` ?[\p{P}\p{S}]+[\r\n]*`
       | `\s*[\r\n]+` | `\s+(?!\S)` | `\s+`
    4  bytes; splits nothing

None of the patterns looks behind, so what follows the end of a match is split as if it stood alone.

Rule A, one neighbour in K, the other not. No character of K is a number, so no group of digits
contains the cut, and the groups left and right are what they would be alone. If the other
neighbour is a number, step 1 separates them; else both are in one piece after step 1, and step 2
separates them there, because a run of K is taken whole and nothing else is taken. Either way
step 3 sees the same pieces as in the parts alone.

Rule B, one neighbour an ASCII digit, the other an ASCII character that is none. A run of numbers
ends or begins at the cut, and its groups are counted from the begin of the run: they are the same
alone. Step 1 separates the neighbours, steps 2 and 3 never see them together.

Rule C, a letter, then an ASCII character that is no letter (so it is neither \p{L} nor \p{M}). If
it is a digit, rule B's argument holds. Else both are in one piece after steps 1 and 2, or rule A's
argument holds. In step 3 a letter can only be taken by the first two alternatives, in `[A-Za-z]+`
or `[\p{L}\p{M}]+`, and the second takes every letter that the search reaches. Both runs end at the
cut: they are greedy, nothing follows them in the pattern, and the right neighbour is not in them.
So a match ends at the cut, and alone the left part ends with the same match, since all it could
have seen of the right part is that its run ends. Earlier matches end before the letter, so the one
that looks ahead, `(?!\S)`, looks at characters of the left part.

The classes are written as code points, not as categories, because categories grow with Unicode and
the tokenizer's may be of another version than Python's: each letter below has been one since
Unicode 5.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["KNOWN_PRE_TOKENIZER", "can_cut", "cut"]

_K = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_WORDS = (
    f"{_PUNCTUATION}[A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def _split(regex: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


KNOWN_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        _split(r"\p{N}{1,3}"),
        _split(f"[{_K}]+"),
        _split(_WORDS),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}

_NO_NORMALIZER = {"type": "Sequence", "normalizers": []}

_LETTERS = (
    "A-Za-z"
    "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"  # Latin
    "\u0391-\u03a1\u03a3-\u03ce"  # Greek
    "\u0400-\u0481\u048a-\u0513"  # Cyrillic
    "\u05d0-\u05ea"  # Hebrew
    "\u0621-\u063a\u0641-\u064a"  # Arabic
    "\u0904-\u0939"  # Devanagari
    "\u0e01-\u0e30"  # Thai
    "\uac00-\ud7a3"  # Hangul
)
_CUT = re.compile(
    f"(?<=[{_K}])(?=[^{_K}])|(?<=[^{_K}])(?=[{_K}])"
    r"|(?<=[0-9])(?=[\x00-/:-\x7f])|(?<=[\x00-/:-\x7f])(?=[0-9])"
    rf"|(?<=[{_LETTERS}])(?=[\x00-@\[-`{{-\x7f])"
)


def can_cut(pre_tokenizer: PreTokenizer, normalizer: Normalizer | None) -> bool:
    """Return whether the rules hold for a tokenizer with these parts: nothing may be normalised."""
    if normalizer is not None and json.loads(normalizer.__getstate__()) != _NO_NORMALIZER:
        return False
    return bool(json.loads(pre_tokenizer.__getstate__()) == KNOWN_PRE_TOKENIZER)


def cut(text: str, piece_len: int) -> list[str]:
    """Return the text in pieces of `piece_len` characters or a little more.

    The ids of the text are the ids of the pieces, one after another. Where no safe place follows, a
    piece is longer, up to the whole text. Takes linear time.
    """
    pieces = []
    start = 0
    while place := _CUT.search(text, start + piece_len):
        pieces.append(text[start : place.start()])
        start = place.start()
    pieces.append(text[start:])
    return pieces
