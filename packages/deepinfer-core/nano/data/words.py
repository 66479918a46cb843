"""Words for lists and strings: a fixed list, and made-up ones that cannot be known by heart."""

from __future__ import annotations

from random import Random

__all__ = ["WORDS", "made_up_word", "word"]

_TEXT = """
apple banana cherry grape lemon melon orange peach pear plum bread butter cheese coffee milk
pepper salt sugar tea water cat dog horse mouse rabbit tiger bird fish lion sheep red blue green
yellow black white brown purple pink gray north south east west river mountain forest garden
house street bridge tower window door table chair lamp clock book paper pencil letter number
index layer token model cache block queue batch kernel tensor matrix vector graph node edge root
leaf branch stone metal glass silver gold iron copper summer winter spring autumn morning
evening night today sun moon star planet cloud rain snow wind fire light music song dance story
picture camera phone screen button keyboard server client network packet router signal cable
engine wheel train plane ship boat car road map city village island ocean beach desert valley
field farm market school office doctor teacher farmer painter writer singer driver pilot sailor
king queen friend family brother sister mother father child people hand foot head heart eye nose
mouth ear arm
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"


def made_up_word(random: Random, longest: int = 7) -> str:
    """Return a pronounceable word of three letters or more."""
    text = ""
    length = random.randint(3, longest)
    while len(text) < length:
        text += random.choice(_CONSONANTS) + random.choice(_VOWELS)
        if random.random() < 0.3:
            text += random.choice("nrslt")
    return text[:length]


def word(random: Random) -> str:
    """Return a word, half of the time a made-up one."""
    return random.choice(WORDS) if random.random() < 0.5 else made_up_word(random)
