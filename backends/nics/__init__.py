"""NIC backends, which move bytes between nodes."""
