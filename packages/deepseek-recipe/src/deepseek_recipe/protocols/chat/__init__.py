"""The Chat Completions protocol."""
