"""Window rings, compressor, index scores and selection, sparse attention."""
