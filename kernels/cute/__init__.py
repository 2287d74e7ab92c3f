"""FP32 kernels in CuTe DSL."""
