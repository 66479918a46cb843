"""What tests and benchmarks of the kernels share."""
