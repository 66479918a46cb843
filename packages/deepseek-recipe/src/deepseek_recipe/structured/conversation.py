"""What a conversation's reply must be: the request's constraint behind reasoning, or calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_recipe.conversation import OutputConstraint, ParsingOptions
from deepseek_recipe.encoding.profile import Profile
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.json_text import load
from deepseek_recipe.structured.grammar import Grammar, build, compile, kept
from deepseek_recipe.structured.reply import Free, ReplyGrammar
from deepseek_recipe.structured.spec import Spec
from deepseek_recipe.structured.tools import CalledTool, CallMarkup, lower_calls
from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["reply_grammar", "spec_of"]

_CALLS = ("tool_call", "tool_call_required")


def reply_grammar(
    constraint: OutputConstraint,
    parsing: ParsingOptions,
    profile: Profile,
    tokenizer: PromptTokenizer,
    vocabulary: TokenVocabulary,
) -> ReplyGrammar | None:
    """Return the grammar of a reply; None where nothing was promised that needs one.

    That is so of tools that may be called but need not, none of them `strict`: masks would make
    every step wait, to rule what the checkpoint was trained to write anyway.

    Raises:
        ConstraintError: the constraint cannot be enforced as it stands.
    """
    mark = tokenizer.special_id(profile.tokens.dsml)
    calls = constraint.kind in _CALLS
    if calls:
        required = constraint.kind == "tool_call_required"
        declared: Any = load(constraint.schema)
        functions = [each["function"] for each in declared]
        if constraint.parallel and not required and not any(map(_is_strict, functions)):
            return None
        grammar = _compiled_calls(constraint, functions, profile, mark, vocabulary)
    else:
        grammar = compile(spec_of(constraint), vocabulary)
    free: list[Free] = []
    if parsing.thinking_initial_stage in ("reasoning_start", "reasoning_continuation"):
        forbidden = {*vocabulary.eos_ids, *((mark,) if calls else ())}
        think_end = tokenizer.special_id(profile.tokens.think_end)
        free.append(Free(think_end, forbidden=frozenset(forbidden)))
    if constraint.kind == "tool_call":
        free.append(Free(mark, behind=b"<"))
    return ReplyGrammar(tuple(free), grammar, vocabulary)


def spec_of(constraint: OutputConstraint) -> Spec:
    """Return what the answer itself must satisfy; not for tools.

    Raises:
        ConstraintError: it is too long, or no text.
    """
    match constraint.kind:
        case "json":
            schema = constraint.exact or constraint.schema
            return Spec.json_schema(schema) if schema else Spec.json_object()
        case "regex" | "choice" | "ebnf" | "structural_tag":
            return Spec(constraint.kind, constraint.schema)
        case _:
            raise AssertionError(f"{constraint.kind} speaks of calls")


def _compiled_calls(
    constraint: OutputConstraint,
    functions: Sequence[Mapping[str, Any]],
    profile: Profile,
    mark: int,
    vocabulary: TokenVocabulary,
) -> Grammar:
    """Return the grammar of calls, made once while it is kept."""
    opened, several = constraint.kind == "tool_call_required", constraint.parallel
    markup = CallMarkup(
        mark,
        profile.block_word,
        profile.invoke_word,
        profile.parameter_word,
        "\n" if profile.gap_in_empty_call else "",
    )

    def make() -> Grammar:
        exact: Any = load(constraint.exact or "{}")
        tools = [
            CalledTool(
                each["name"],
                exact.get(each["name"], each["parameters"]) if _is_strict(each) else None,
            )
            for each in functions
        ]
        return build(lower_calls(tools, markup, opened=opened, several=several), vocabulary)

    key = f"{constraint.kind} {several} {markup}", constraint.schema + constraint.exact
    return kept(vocabulary, key, make)


def _is_strict(function: Mapping[str, Any]) -> bool:
    return bool(function["strict"])
