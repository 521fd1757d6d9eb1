"""Virtual machines with the kernel's software RDMA device, for ``scripts/test_rxe.py``."""
