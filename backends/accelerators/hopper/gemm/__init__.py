"""The GEMM ops: fused kernels, few rows, and the library path whole or in parts."""
