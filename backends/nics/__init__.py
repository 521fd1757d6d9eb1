"""NIC backends: how bytes move between nodes."""
