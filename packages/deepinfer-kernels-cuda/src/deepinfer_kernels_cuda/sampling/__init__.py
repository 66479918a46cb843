"""Choosing tokens and scoring them."""
