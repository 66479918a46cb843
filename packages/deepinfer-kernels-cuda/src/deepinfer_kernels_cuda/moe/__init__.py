"""Router, permutation of rows, routed experts and the shared expert."""
