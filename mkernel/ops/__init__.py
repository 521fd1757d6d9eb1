"""The ops. Each module opens with its data flow; validation that several share is in ``validate``."""
