"""Copies between a GPU, its peers and the host: three engines, and which to use when."""
