"""The version of mkernel, and of its package (pyproject.toml)."""

__version__ = "0.2.0"
