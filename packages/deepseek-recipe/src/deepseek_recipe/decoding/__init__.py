"""Token ids to events: bytes, marks, tool markup, JSON mode, stop strings."""
