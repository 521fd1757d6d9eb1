"""GEMM ops by library products."""
