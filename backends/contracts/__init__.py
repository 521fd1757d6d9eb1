"""The contracts that every accelerator backend and every NIC backend implements.

A backend is a class that an entry point names (groups ``mkernel.accelerators`` and
``mkernel.nics``). It is constructed without arguments, cheaply, and imports what it needs lazily,
so that ``mkernel doctor`` can query every backend for what it lacks.

Responsibilities: the *world* owns symmetric memory, signal pads (always in host memory), epochs and
failure handling; the *accelerator backend* runs kernels on that memory; the *NIC backend* moves
bytes between nodes. Addresses are plain integers in this process's address space.
"""
