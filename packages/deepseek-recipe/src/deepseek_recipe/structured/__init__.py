"""Constraints on what a model writes: grammars, token masks and their front ends.

    from deepseek_recipe.structured import Spec, TokenVocabulary, compile

    vocabulary = TokenVocabulary.of("MODEL_FOLDER")
    matcher = compile(Spec.choice(["yes", "no"]), vocabulary).matcher()

Needs `llguidance` and `numpy`; nothing outside this package imports it at its top.
"""

from deepseek_recipe.structured.batch import fill_batch, fill_windows
from deepseek_recipe.structured.grammar import Grammar, compile
from deepseek_recipe.structured.matcher import Matcher
from deepseek_recipe.structured.spec import Spec
from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["Grammar", "Matcher", "Spec", "TokenVocabulary", "compile", "fill_batch", "fill_windows"]
