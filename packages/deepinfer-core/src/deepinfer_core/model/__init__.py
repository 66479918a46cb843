"""The model: its shapes, its weights on disk, and its forward pass."""
