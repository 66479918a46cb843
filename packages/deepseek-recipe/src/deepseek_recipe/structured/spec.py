"""`Spec`: what a text must satisfy, as a value that can be compared and cached."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.json_text import dump_compact

__all__ = ["Kind", "Spec"]

Kind: TypeAlias = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]

# Characters of a constraint. A grammar of this size takes a compiler well under a second.
_MAX_CHARS = 262_144


@dataclass(frozen=True)
class Spec:
    """One constraint; the constructors below check what they are given.

    Attributes:
        kind: how `content` is read.
        content: JSON text of a schema (`json_schema`) or of a list of strings (`choice`), a
            pattern (`regex`), a grammar (`ebnf`), JSON text of tags (`structural_tag`); empty for
            `json_object`.
    """

    kind: Kind
    content: str = ""

    def __post_init__(self) -> None:
        """Check types and size.

        Raises:
            ConstraintError: the kind is unknown, or the content is no string, is too long, has a
                lone surrogate, or is missing where the kind needs one.
        """
        if self.kind not in get_args(Kind):
            allowed = ", ".join(map(repr, get_args(Kind)))
            raise ConstraintError("", f"`kind` is {shown(self.kind)}; allowed: {allowed}.")
        if not isinstance(self.content, str):
            raise ConstraintError(
                "", f"`content` is {shown(self.content)}, which is no string. Give the text."
            )
        if len(self.content) > _MAX_CHARS:
            raise ConstraintError(
                "",
                f"the constraint has {len(self.content)} characters; allowed: {_MAX_CHARS}. "
                "Make it smaller.",
            )
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            raise ConstraintError(
                "",
                f"there is a lone surrogate at character {error.start}. Send valid Unicode.",
            ) from error
        if self.kind == "json_object" and self.content:
            raise ConstraintError("", "`json_object` takes no content. Use `json_schema` for one.")
        if self.kind not in ("json_object", "regex") and not self.content:
            raise ConstraintError(
                "", f"a constraint of kind `{self.kind}` needs a content. Give its text."
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, JsonValue] | bool | str) -> Spec:
        """Return the constraint of a schema, parsed or as JSON text.

        Raises:
            ConstraintError: it is neither, or as in the class.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if not isinstance(schema, (Mapping, bool)):
            raise ConstraintError(
                "", f"the schema is {shown(schema)}; allowed: an object, true or false."
            )
        try:
            return cls(
                "json_schema", dump_compact(schema if isinstance(schema, bool) else dict(schema))
            )
        except (ValueError, RecursionError) as error:
            raise ConstraintError(
                "", f"the schema is not JSON: {error}. Use JSON values only."
            ) from error

    @classmethod
    def json_object(cls) -> Spec:
        """Return the constraint that the text is one JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Spec:
        """Return the constraint that the whole text matches a pattern.

        Raises:
            ConstraintError: as in the class.
        """
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, grammar: str) -> Spec:
        """Return the constraint of a grammar.

        Raises:
            ConstraintError: as in the class.
        """
        return cls("ebnf", grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Spec:
        """Return the constraint that the text is one of some.

        Raises:
            ConstraintError: there are none, one is no string, or as in the class.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence) or not texts:
            raise ConstraintError(
                "", f"the choice is {shown(texts)}; allowed: a list of one string or more."
            )
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise ConstraintError(
                    f"/{number}", f"{shown(text)} is no string. Put it in quotes."
                )
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def structural_tag(cls, tags: Mapping[str, JsonValue] | str) -> Spec:
        """Return the constraint of free text with tags in it, as `structured.tags` reads it.

        Raises:
            ConstraintError: as `json_schema`.
        """
        text = tags if isinstance(tags, str) else cls.json_schema(tags).content
        return cls("structural_tag", text)
