"""`python -m deepinfer_eplb` is the command `deepinfer-eplb`."""

from __future__ import annotations

import sys

from deepinfer_eplb.cli import main

if __name__ == "__main__":
    sys.exit(main())
