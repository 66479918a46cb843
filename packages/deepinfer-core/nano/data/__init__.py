"""Seeded examples in the prompt format of `deepseek-recipe`."""
