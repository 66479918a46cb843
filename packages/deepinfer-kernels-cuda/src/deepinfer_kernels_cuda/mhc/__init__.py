"""Hyper-connections: coefficients of the residual streams, their collapse and merge."""
