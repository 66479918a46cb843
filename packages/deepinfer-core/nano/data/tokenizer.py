"""Trains the vocabulary of `deepinfer-nano`: byte-level BPE, each digit alone, 4,096 ids.

`python -m nano.data.tokenizer OUT` writes the tokenizer.json. It depends on the tasks and on the
texts of the interpreter's library, so that another Python version gives another vocabulary: the
one that the model was trained with is shipped beside its weights.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepseek_recipe.encoding.profile import V41
from nano.data.encoding import spelled
from nano.data.tasks import TASKS

__all__ = ["SPECIAL_TOKENS", "VOCAB_SIZE", "train"]

VOCAB_SIZE = 4096
_TOKENS = V41.tokens
# By id. The fourth is the drafter's noise token too, as in the released checkpoint.
SPECIAL_TOKENS: tuple[str, ...] = (
    _TOKENS.bos,
    _TOKENS.eos,
    "<｜▁pad▁｜>",
    _TOKENS.system or "",
    _TOKENS.user,
    _TOKENS.assistant,
    _TOKENS.think,
    _TOKENS.think_end,
    _TOKENS.dsml,
    _TOKENS.latest_reminder,
    _TOKENS.image or "",
    *_TOKENS.grounding,
)
# Characters of text to learn from, all tasks together, and of library text besides its share.
_SAMPLE_LEN = 12_000_000
# A text between two control tokens counts so often at most: the heads of prompts are a few long
# tokens' worth, not a vocabulary's.
_MAX_COUNT = 8
_OTHER_LANGUAGES = """
Der schnelle braune Fuchs springt über den faulen Hund. Ich möchte wissen, wie spät es ist. Kannst
du mir bitte helfen? Das ist eine gute Frage, aber ich weiß es nicht. Wir haben heute schönes
Wetter, und die Kinder spielen im Garten. Guten Morgen, guten Tag, guten Abend, gute Nacht. Vielen
Dank für die Antwort. Die Straße ist lang, der Weg ist nicht weit. Was kostet das? Wo ist der
nächste Bahnhof? Heute ist Montag, morgen ist Dienstag. Eins, zwei, drei, vier, fünf, sechs.
Le renard brun saute par-dessus le chien paresseux. Je voudrais savoir quelle heure il est.
Pouvez-vous m'aider, s'il vous plaît ? C'est une bonne question, mais je ne sais pas. Il fait beau
aujourd'hui et les enfants jouent dans le jardin. Bonjour, bonsoir, bonne nuit. Merci beaucoup pour
la réponse. La rue est longue, le chemin n'est pas loin. Combien ça coûte ? Où est la gare ?
Aujourd'hui c'est lundi, demain c'est mardi. Un, deux, trois, quatre, cinq, six.
El rápido zorro marrón salta sobre el perro perezoso. Quisiera saber qué hora es. ¿Puede ayudarme,
por favor? Es una buena pregunta, pero no lo sé. Hoy hace buen tiempo y los niños juegan en el
jardín. Buenos días, buenas tardes, buenas noches. Muchas gracias por la respuesta. La calle es
larga, el camino no está lejos. ¿Cuánto cuesta? ¿Dónde está la estación? Hoy es lunes, mañana es
martes. Uno, dos, tres, cuatro, cinco, seis.
"""


def train(seed: int = 4) -> Tokenizer:
    """Return a vocabulary learned from a seeded sample of all tasks."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=2,
    )
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = split
    learned.train_from_iterator(_texts(seed), trainer)
    merges = json.loads(learned.to_str())["model"]["merges"]
    # control tokens first, then bytes, then what was learned, in its order
    by_age = sorted(learned.get_vocab().items(), key=lambda item: item[1])
    entries = [*SPECIAL_TOKENS, *(token for token, _ in by_age)]
    assert len(entries) == VOCAB_SIZE, f"the texts give {len(entries)} entries only"
    vocab = {token: token_id for token_id, token in enumerate(entries)}
    pairs = [(left, right) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in SPECIAL_TOKENS]
    )
    return tokenizer


def _texts(seed: int) -> Iterator[str]:
    """Yield the plain texts between control tokens, each a few times at most."""
    marks = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    total = sum(share for _, share in TASKS.values())
    counts: Counter[str] = Counter()
    for task, (draw, share) in TASKS.items():
        random = Random(f"vocabulary/{seed}/{task}")
        left = _SAMPLE_LEN * share / total
        while left > 0:
            text = spelled(draw(random).conversation)
            left -= len(text)
            for piece in filter(None, marks.split(text)):
                counts[piece] += 1
                if counts[piece] <= _MAX_COUNT:
                    yield piece
    yield from [_OTHER_LANGUAGES] * _MAX_COUNT


def main() -> None:
    """Train the vocabulary and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the tokenizer.json to write")
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    train(options.seed).save(str(options.out))


if __name__ == "__main__":
    main()
