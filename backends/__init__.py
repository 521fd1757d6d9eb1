"""Accelerator and NIC backends behind common contracts (see :mod:`mkernel.backends.contracts`)."""
