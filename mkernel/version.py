"""The version of mkernel: also of its package (pyproject.toml)."""

__version__ = "0.2.0"
