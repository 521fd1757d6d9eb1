"""What accelerator backends share on NVIDIA's devices: memory that peers map, copies, signals."""
