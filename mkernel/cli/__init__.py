"""The ``mkernel`` command: one module a subcommand, mounted by ``main``."""
