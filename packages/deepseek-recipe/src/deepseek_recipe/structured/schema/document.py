"""The schemas of one document by number, and where its references lead."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urldefrag, urljoin

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.json_text import dump_compact

__all__ = ["Document", "Site", "escape_pointer"]

_IN_MAP = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = (
    "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_MAX_REFERENCE_CHARS = 4096


@dataclass(frozen=True)
class Site:
    """One schema: where it stands, its text as read, and the address its references start from."""

    pointer: str
    schema: JsonValue
    base: str
    made: str = ""
    """Of a schema made for a part of another: its text; `pointer` is then the other's."""
    inner: str = ""
    """Place within the made one."""


def escape_pointer(key: str) -> str:
    """Return a key as it stands in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


class Document:
    """A checked schema, opened part by part.

    Raises:
        ConstraintError: two schemas of one address.
    """

    def __init__(self, root: JsonValue) -> None:
        """Find all addresses and anchors of `root`."""
        self._sites: list[Site] = []
        self._by_place: dict[tuple[str, str], int] = {}
        self._bases: dict[str, Site] = {}
        self._anchors: dict[tuple[str, str], Site] = {}
        self._dynamic: dict[str, int] = {}
        self._bases[""] = Site("", root, "")
        self._index(root)

    def __getitem__(self, number: int) -> Site:
        """Return a schema by its number."""
        return self._sites[number]

    def __len__(self) -> int:
        """Return how many schemas have a number."""
        return len(self._sites)

    def root(self) -> int:
        """Return the number of the whole."""
        schema = self._bases[""].schema
        return self._number(Site("", schema, self._base_in(schema, "")))

    def below(self, site: Site, *keys: str | int) -> int:
        """Return the number of the schema at some keys below another."""
        schema, pointer = site.schema, site.pointer
        for key in keys:
            schema = schema[key]  # type: ignore[index]
            pointer += "/" + escape_pointer(str(key))
        base = self._base_in(schema, site.base)
        if site.made:
            inner = site.inner + pointer[len(site.pointer) :]
            return self._number(Site(site.pointer, schema, base, site.made, inner))
        return self._number(Site(pointer, schema, base))

    def made(self, site: Site, schema: JsonValue) -> int:
        """Return the number of a schema that stands for a part of `site`."""
        return self._number(Site(site.pointer, schema, site.base, dump_compact(schema)))

    def target(self, site: Site, keyword: str) -> int:
        """Return the number of what a `$ref` or `$dynamicRef` of a schema leads to.

        Raises:
            ConstraintError: it leads out of the document, to nothing, or depends on the way taken.
        """
        reference: str = site.schema[keyword]  # type: ignore[index]
        place = f"{site.pointer}/{keyword}"
        if len(reference) > _MAX_REFERENCE_CHARS:
            raise ConstraintError(
                place,
                f"the reference has {len(reference)} characters; allowed: {_MAX_REFERENCE_CHARS}. "
                "Use a shorter name.",
            )
        try:
            base, fragment = urldefrag(self._joined(site.base, reference))
        except ValueError as error:
            raise ConstraintError(
                place,
                f"{shown(reference)} is no address: {error}. Use a form such as `#/$defs/name`.",
            ) from error
        home = self._bases.get(base)
        if home is None:
            raise ConstraintError(
                place,
                f"{shown(reference)} leads out of the schema, and nothing is fetched. Put its "
                "target under `$defs`.",
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((base, fragment))
            if found is None:
                raise ConstraintError(
                    place,
                    f"no `$anchor` {shown(fragment)} in the schema. Add it, or refer by "
                    "`#/$defs/name`.",
                )
            dynamic = isinstance(found.schema, dict) and "$dynamicAnchor" in found.schema
            if keyword == "$dynamicRef" and dynamic and self._dynamic.get(fragment, 0) > 1:
                raise ConstraintError(
                    place, f"{shown(reference)} has several targets. Use `$ref` and `$anchor`."
                )
            return self._number(found)
        return self._number(self._walk(home, fragment, place))

    def _walk(self, home: Site, fragment: str, place: str) -> Site:
        schema, pointer, base = home.schema, home.pointer, home.base
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(key)] if isinstance(schema, list) else schema[key]  # type: ignore[index]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise ConstraintError(
                    place,
                    f"nothing stands at {shown(fragment)}. Refer to a schema of this document.",
                ) from error
            pointer += "/" + escape_pointer(key)
            base = self._base_in(schema, base)
        if not isinstance(schema, (bool, dict)):
            raise ConstraintError(
                place,
                f"at {shown(fragment)} stands {shown(schema)}, which is no schema. Refer to an "
                "object, true or false.",
            )
        return Site(pointer, schema, base)

    def _index(self, root: JsonValue) -> None:
        stack: list[tuple[str, JsonValue, str]] = [("", root, "")]
        while stack:
            pointer, schema, base = stack.pop()
            if not isinstance(schema, dict):
                continue
            base = self._base_in(schema, base)
            site = Site(pointer, schema, base)
            if isinstance(schema.get("$id"), str):
                if base in self._bases and base:
                    raise ConstraintError(
                        f"{pointer}/$id",
                        f"{shown(base)} names a second schema; each needs its own. Rename one.",
                    )
                self._bases[base] = site
                if not pointer:
                    self._bases[""] = Site("", root, "")
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    key = (base, schema[keyword])
                    if key in self._anchors and self._anchors[key].pointer != pointer:
                        raise ConstraintError(
                            f"{pointer}/{keyword}",
                            f"{shown(schema[keyword])} names a second schema; each needs its own. "
                            "Rename one.",
                        )
                    self._anchors[key] = site
            if isinstance(name := schema.get("$dynamicAnchor"), str):
                self._dynamic[name] = self._dynamic.get(name, 0) + 1
            for keyword, value in schema.items():
                start = f"{pointer}/{keyword}"
                if keyword in _ALONE:
                    stack.append((start, value, base))
                elif keyword in _IN_LIST and isinstance(value, list):
                    stack += [(f"{start}/{at}", each, base) for at, each in enumerate(value)]
                elif keyword in _IN_MAP and isinstance(value, dict):
                    stack += [
                        (f"{start}/{escape_pointer(key)}", each, base)
                        for key, each in value.items()
                    ]

    def _base_in(self, schema: JsonValue, base: str) -> str:
        name = schema.get("$id") if isinstance(schema, dict) else None
        if not isinstance(name, str):
            return base
        try:
            return urldefrag(self._joined(base, name))[0]
        except ValueError:
            return base

    @staticmethod
    def _joined(base: str, reference: str) -> str:
        if reference.startswith("#") or not reference:
            return base + reference
        return urljoin(base, reference)

    def _number(self, site: Site) -> int:
        place = (site.made, site.inner if site.made else site.pointer)
        number = self._by_place.setdefault(place, len(self._sites))
        if number == len(self._sites):
            self._sites.append(site)
        return number
