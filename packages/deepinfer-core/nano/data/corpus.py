"""Plain text and code: docstrings and short functions of the running interpreter's library."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from deepseek_recipe.conversation import Conversation, Message
from nano.data.example import Draw, Example

__all__ = ["TASKS", "Document", "documents"]

# Packages besides the modules that stand directly in the library's folder.
_PACKAGES = (
    "asyncio",
    "collections",
    "concurrent/futures",
    "ctypes",
    "curses",
    "dbm",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "re",
    "sqlite3",
    "tomllib",
    "unittest",
    "urllib",
    "wsgiref",
    "xml/dom",
    "xml/etree",
    "xmlrpc",
    "zoneinfo",
)
_MAX_FUNCTION_LINES = 40
_SHORTEST, _LONGEST = 60, 4000
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Document:
    """A text, and where in the library it stands: by names, which other versions share."""

    place: str
    text: str


@lru_cache(maxsize=1)
def documents() -> tuple[Document, ...]:
    """Return all texts; no piece of the library is in two of them. Made once a process."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    for package in _PACKAGES:
        files += sorted((library / package).glob("*.py"))
    found = []
    for file in files:
        name = file.relative_to(library).as_posix()
        source = file.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for document in _of_node(ast.parse(source), name, lines):
            if _SHORTEST <= len(document.text) <= _LONGEST and _is_plain(document.text):
                found.append(document)
    return tuple(found)


def _is_plain(text: str) -> bool:
    # nothing that a control token is spelled with, no doctests of other scripts
    return text.isascii() and "think>" not in text


def _of_node(node: ast.AST, place: str, lines: list[str]) -> Iterator[Document]:
    """Yield the texts of a module, class or function and of what stands in it."""
    if isinstance(node, _Function):
        end = node.end_lineno or node.lineno
        if end - node.lineno < _MAX_FUNCTION_LINES:
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield Document(place, textwrap.dedent("\n".join(lines[start - 1 : end])))
            return
    if isinstance(node, _Function | ast.ClassDef | ast.Module):
        docstring = ast.get_docstring(node)
        if docstring:
            yield Document(place, docstring)
        for child in node.body:
            if isinstance(child, _Function | ast.ClassDef):
                yield from _of_node(child, f"{place}:{child.name}", lines)


def _text(random: Random) -> Example:
    document = random.choice(documents())
    message = Message("assistant", (document.text,))
    return Example("text", document.place, Conversation((message,), thinking=False))


TASKS: dict[str, tuple[Draw, float]] = {"text": (_text, 0.08)}
