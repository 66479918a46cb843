"""The training loop of `deepinfer-nano`: optimiser, row loader, saved state and loss curve."""
