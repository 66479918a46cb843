"""Twins: every op in plain PyTorch, slow and obvious, on any device.

What a twin computes follows from dtypes. float32 activations are computed with in float32 and
nothing is rounded; bfloat16 ones are rounded where the released numerics round. Stores of bytes
hold packed entries, stores of float32 plain ones.
"""
