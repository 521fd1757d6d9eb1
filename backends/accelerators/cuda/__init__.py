"""Backend for CUDA devices that reach each other's memory, and what others on such devices share."""
