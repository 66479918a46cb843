"""JSON Schema to grammar: what is accepted is enforced exactly, what cannot be is refused."""

from __future__ import annotations

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.lowered import Lowered
from deepseek_recipe.structured.schema.check import check_schema
from deepseek_recipe.structured.schema.document import Document
from deepseek_recipe.structured.schema.expander import Expander
from deepseek_recipe.structured.schema.keywords import KEYWORDS, keyword_table
from deepseek_recipe.structured.schema.writer import write_grammar

__all__ = ["KEYWORDS", "check_schema", "keyword_table", "lower_schema"]


def lower_schema(schema: JsonValue) -> Lowered:
    """Return the grammar of the JSON texts that a schema of draft 2020-12 allows.

    Members come in the order of `properties`, others behind them; an integer is written without
    exponent and without fraction but `.0`, a character in one spelling. So some valid texts are
    not produced, but no invalid one is.

    Args:
        schema: as `json_text.load` returns it.

    Raises:
        ConstraintError: it is no schema, allows nothing, or cannot be enforced; `path` is a JSON
            pointer.
    """
    check_schema(schema)
    try:
        expander = Expander(Document(schema))
        grammar = write_grammar(expander)
    except RecursionError as error:
        raise ConstraintError(
            "", "schemas are nested too deeply. Put inner ones under `$defs`."
        ) from error
    return Lowered(grammar, tuple(expander.warnings))
