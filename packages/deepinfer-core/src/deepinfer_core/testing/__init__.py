"""Stand-ins for tests and benchmarks; nothing of the product imports them."""
