"""`python -m deepinfer_specdec` is the command `deepinfer-specdec`."""

from __future__ import annotations

import sys

from deepinfer_specdec.cli import main

if __name__ == "__main__":
    sys.exit(main())
