"""Ops of the CPU backend in plain torch, one file a family."""
