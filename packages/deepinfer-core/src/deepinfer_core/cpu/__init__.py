"""Core's own backend: every op of the model in plain torch, and a runtime for the CPU."""
