"""The common part of accelerator backends on CUDA devices: memory that peers map, copies, signals.
It is no backend itself: no entry point names it."""
