"""Benchmarks behind `deepinfer bench`, and the random models they run on."""
