"""Copies between a GPU, its peers and the host by three engines, and the choice between them."""
