// The same test where nvcc compiles for the host; device code has tests/native/cuda/replayed_words.cu.
#include "tests/native/transport/test_signal.cpp"
