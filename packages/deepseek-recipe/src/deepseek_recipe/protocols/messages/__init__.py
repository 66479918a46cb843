"""The Messages protocol."""
