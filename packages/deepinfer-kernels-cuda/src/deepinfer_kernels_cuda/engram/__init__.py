"""Engram: hashed n-grams, table reads, gated addition."""
