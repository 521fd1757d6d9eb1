// The same test where nvcc compiles for the host; device code has tests/native/cuda/fifo_on_gpu.cpp.
#include "tests/native/transport/test_fifo_device.cpp"
