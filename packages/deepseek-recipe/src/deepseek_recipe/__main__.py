"""`python -m deepseek_recipe` is the command `deepseek-recipe`."""

from __future__ import annotations

import sys

from deepseek_recipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
