"""Benchmarks that are run by hand or by the GPU suites: decoding speed, training speed, and all families compared."""
