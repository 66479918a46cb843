"""Matrix products with fp8-tile, bfloat16 and float32 weights."""
