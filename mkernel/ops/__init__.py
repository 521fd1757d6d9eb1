"""The ops. Each module opens with its data flow; shared checks are in ``validate``."""
