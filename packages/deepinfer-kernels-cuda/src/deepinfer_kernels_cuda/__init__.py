"""Every op of DeepSeek-V4.1-Flash in Triton, each with a plain PyTorch twin in `reference`."""

__version__ = "0.1.0"
