"""What a front end makes of a constraint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lowered:
    """Grammar text for the mask engine; its start rule is `start`."""

    grammar: str
    warnings: tuple[str, ...] = ()
    """What does not constrain the text although the constraint names it (annotations)."""
