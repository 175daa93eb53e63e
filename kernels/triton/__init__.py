"""GPU kernels in Triton, launched by the operators of the same names in `drafttrain/ops`."""
