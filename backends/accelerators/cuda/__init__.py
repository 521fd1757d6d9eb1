"""The common part of accelerator backends on NVIDIA's devices: memory that peers map, copies,
signals."""
