"""Ring attention and its backward: a library on parts of the keys, or own kernels."""
