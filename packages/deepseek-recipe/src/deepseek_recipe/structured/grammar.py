"""Constraint to `Grammar`: what all matchers of one constraint share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.json_text import load
from deepseek_recipe.structured.deep_stack import on_a_deep_stack
from deepseek_recipe.structured.judge import fault_of
from deepseek_recipe.structured.lowered import Lowered, quoted
from deepseek_recipe.structured.matcher import Matcher
from deepseek_recipe.structured.spec import Kind, Spec
from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["Grammar", "build", "compile", "kept", "lower"]

# Characters of engine text. 1 M characters of alternatives take the engine about as long as a
# constraint may take in all.
_MAX_LOWERED_CHARS = 2_000_000
_PROBED = 4  # tokens with which a grammar is tried
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): *")


@dataclass(frozen=True)
class Grammar:
    """A constraint that was compiled for a vocabulary. May be used from several threads.

    Attributes:
        warnings: what of the constraint does not constrain the text (annotations).
    """

    warnings: tuple[str, ...]
    _vocabulary: TokenVocabulary
    _engine: LLMatcher
    _spec: Spec | None = None

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text."""
        return Matcher(self._engine, self._vocabulary)

    @property
    def is_broken(self) -> bool:
        """Whether a fault of the engine in one text has spoilt what all texts share."""
        copy = self._engine.deep_copy()
        copy.compute_bitmask()
        return copy.is_error()

    def fault_of(self, text: str) -> str | None:
        """Return why a finished text does not satisfy the constraint, by a library of its own.

        None if it does, and where that cannot be told (of patterns and grammars).
        """
        return None if self._spec is None else fault_of(self._spec, text)


def compile(spec: Spec, vocabulary: TokenVocabulary) -> Grammar:
    """Return the grammar of a constraint; an equal one is compiled only once while it is kept.

    May take up to a second, so call it where a request is read, not where a step is made.

    Raises:
        ConstraintError: the constraint cannot be enforced as it stands.
    """
    return kept(
        vocabulary,
        (spec.kind, spec.content),
        lambda: replace(build(lower(spec), vocabulary), _spec=spec),
    )


def kept(vocabulary: TokenVocabulary, key: tuple[str, str], make: Callable[[], Grammar]) -> Grammar:
    """Return the grammar of a key (what it is, and its text), made unless it is still kept.

    Raises:
        ConstraintError: what `make` raises.
    """
    grammars, weight = vocabulary.grammars, len(key[1]) + 1
    made: list[Grammar] = []  # by this call: those were tried already

    def make_here() -> Grammar:
        made.append(make())
        return made[-1]

    try:
        grammar = grammars.get(key, weight, make_here)
        if not made and grammar.is_broken:
            grammars.drop(key)
            grammar = grammars.get(key, weight, make)
        return grammar
    except ConstraintError as error:
        # Several threads may get the same one: each raises its own.
        raise ConstraintError(error.path, error.message) from error


def lower(spec: Spec) -> Lowered:
    """Return the engine's text for a constraint.

    Raises:
        ConstraintError: the constraint cannot be enforced as it stands.
    """
    return _FRONT_ENDS[spec.kind](spec.content)


def build(lowered: Lowered, vocabulary: TokenVocabulary) -> Grammar:
    """Return the grammar of an engine text, which is not kept.

    Raises:
        ConstraintError: the text is too long, or the engine refuses it.
    """
    if len(lowered.grammar) > _MAX_LOWERED_CHARS:
        raise ConstraintError(
            "",
            f"the constraint becomes a grammar of {len(lowered.grammar)} characters; allowed: "
            f"{_MAX_LOWERED_CHARS}. Make it smaller.",
        )
    engine = on_a_deep_stack(
        lambda: LLMatcher(vocabulary.engine, lowered.grammar, log_level=0, limits=_limits())
    )
    if engine.is_error():
        cause = _PLACE.sub("", engine.get_error().split("\n", 1)[0])
        raise ConstraintError(
            "", f"the mask engine refuses the constraint: {cause}. Make it simpler."
        )
    warnings = (*lowered.warnings, *engine.get_grammar_warnings())
    grammar = Grammar(warnings, vocabulary, engine)
    grammar.matcher().forced()  # refuses a text that is all but fixed and much too long
    _probe(grammar.matcher())
    return grammar


def _probe(matcher: Matcher) -> None:
    """Refuse a grammar too wide for the engine, which it finds out only with the first tokens."""
    row = np.empty(matcher.vocabulary.num_words, np.int32)
    try:
        for _ in range(_PROBED):
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if matcher.done or not len(allowed):
                return
            matcher.accept([int(allowed[0])])
    except ConstraintError as error:
        raise ConstraintError(
            "",
            f"the constraint has too many ways to begin for the mask engine ({error.message}); "
            "use fewer optional members or alternatives.",
        ) from error


def _limits() -> LLParserLimits:
    # Fuel to build a lexer, then for one mask of it; 50 and 14 units a microsecond by the engine's
    # own figures, so 20 ms and 14 ms. States are about 2 kB each: 100 MB for one text.
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        max_items_in_row=2000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _schema(content: str) -> Lowered:
    from deepseek_recipe.structured.schema import lower_schema

    try:
        schema = load(content)
    except ValueError as error:
        raise ConstraintError("", f"the schema is not JSON: {error}. Mend its text.") from error
    return lower_schema(schema)


def _object(_: str) -> Lowered:
    return _schema('{"type":"object"}')


def _regex(content: str) -> Lowered:
    from deepseek_recipe.structured.regex import lower_regex

    return lower_regex(content)


def _ebnf(content: str) -> Lowered:
    from deepseek_recipe.structured.ebnf import lower_ebnf

    return lower_ebnf(content)


def _tags(content: str) -> Lowered:
    from deepseek_recipe.structured.tags import lower_tags

    return lower_tags(content)


def _choice(content: str) -> Lowered:
    try:
        texts = load(content)
    except ValueError as error:
        raise ConstraintError("", f"the choice is not JSON: {error}. Mend its text.") from error
    if not isinstance(texts, list) or not texts:
        raise ConstraintError(
            "", f"the choice is {shown(texts)}; allowed: a list of one string or more."
        )
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConstraintError(f"/{number}", f"{shown(text)} is no string. Put it in quotes.")
    # One lexeme, so that a text which begins another one is told from it by what follows.
    parts = "|".join(quoted(text) or "()" for text in dict.fromkeys(texts))
    return Lowered(f"start: TEXT\nTEXT: /{parts}/\n")


_FRONT_ENDS: dict[Kind, Callable[[str], Lowered]] = {
    "json_schema": _schema,
    "json_object": _object,
    "regex": _regex,
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _tags,
}
