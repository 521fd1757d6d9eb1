"""What an accelerator backend and a NIC backend must provide.

A backend is a class that an entry point names (groups ``mkernel.accelerators`` and
``mkernel.nics``); it is constructed without arguments, cheaply, and imports what it needs lazily,
so that ``mkernel doctor`` can ask every backend what it lacks.

Who does what: the *world* owns symmetric memory, signal pads (always in host memory), epochs and
failure handling; the *accelerator backend* runs kernels on it; the *NIC backend* moves bytes between
nodes. Addresses are plain integers of this process's address space.
"""
