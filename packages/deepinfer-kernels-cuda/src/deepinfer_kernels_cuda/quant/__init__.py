"""Number formats of activations and of cache entries."""
