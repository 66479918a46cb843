"""`python -m deepinfer_core` is the command `deepinfer`."""

from deepinfer_core.cli import main

if __name__ == "__main__":
    main()
