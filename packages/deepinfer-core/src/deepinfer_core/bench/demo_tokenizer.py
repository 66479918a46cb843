"""A small byte-level tokenizer, trained on the text below: no download, always the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["build_tokenizer"]

_NUM_BYTES = 256

# Cases, accents, scripts and spacing differ on purpose: Engram folds such variants together.
_TEXT = """
A harbour town wakes before the sun. Fishing boats leave the quay one after another, and their
lamps draw slow lines over the dark water. In the market hall women unpack oranges, bread, cheese
and salt; a boy carries ice from the cellar and sings the same song every morning. When the first
train arrives the square fills with voices. People read the newspaper, drink coffee, complain about
the weather and forget what they wanted to buy.

The old lighthouse keeper writes everything down: the direction of the wind, the height of the
tide, the number of ships that pass between breakfast and noon. "Numbers do not lie," he says,
"but they do not tell stories either." His daughter builds machines that count. She explained it
to him once: a model reads a token, looks at the tokens before it, and guesses the next. It keeps
a window of recent things, a compressed memory of older things, and a table of phrases it has seen.
He laughed and said that this was exactly how a lighthouse keeper works.

THE HARBOUR TOWN. THE OLD LIGHTHOUSE. The Market Hall. Numbers And Stories.

Question: what is the answer to 12 + 30? Answer: 42. Question: how many days are in a week?
Answer: seven, and none of them is long enough. 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024 2025 3.14

def count_ships(log):
    total = 0
    for line in log:
        if line.startswith("ship"):
            total += 1
    return total

for index in range(10):
    print(index, index * index)

{"name": "harbour", "boats": [3, 5, 8], "open": true, "owner": null}

Le café près de l'église est fermé; l'élève déçu s'en va. Die Straße führt über die Brücke zum
großen Schloß. El niño pequeño canta una canción mañana. Žluťoučký kůň. Привет, мир! Хорошая погода.
港の町は朝が早い。船が海へ出る。今日の天気は晴れです。
我们在港口看日出。你好世界。 안녕하세요 세계.
naive naïve NAÏVE, resume résumé RÉSUMÉ, cafe café CAFÉ, fiancee fiancée, uber über ÜBER.

She measured the bridge twice, because measuring is cheaper than building. The engineer answered
that cheap things become expensive whenever nobody checks them. Therefore every evening they walked
along the railway, counted the sleepers, compared both lists, and corrected whichever was wrong.
Winter came, then spring; the river rose, the bridge held, and the children learned to swim.
Remember: write short sentences. Choose simple words. Measure first, improve afterwards, and keep
a record of everything that surprised you. Yesterday, today and tomorrow share one calendar.
"""


def build_tokenizer(vocab_size: int, special: Mapping[int, str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer with exactly `vocab_size` ids.

    Ids left over when the text is used up are special tokens named `<extra_N>`.

    Args:
        vocab_size: at least 256 bytes and the special tokens.
        special: the special tokens by id.
    Raises:
        ConfigError: the vocabulary is too small.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    num_free = vocab_size - len(special)
    if num_free < _NUM_BYTES:
        raise ConfigError(
            f"`vocab_size` is {vocab_size}, but a byte-level tokenizer needs {_NUM_BYTES} ids "
            f"beside its {len(special)} special tokens; set it to "
            f"{_NUM_BYTES + len(special)} or more."
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_free, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split
    trained.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    by_age = sorted(trained.get_vocab().items(), key=lambda item: item[1])

    # the special ids are where the model wants them; what was learned takes the others in order
    names = dict(special)
    free = [token_id for token_id in range(vocab_size) if token_id not in special]
    vocab = {token: free[place] for token, place in by_age}
    names |= {token_id: f"<extra_{token_id}>" for token_id in free[len(vocab) :]}
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]
    vocab |= {name: token_id for token_id, name in names.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for _, name in sorted(names.items())]
    )
    return tokenizer
