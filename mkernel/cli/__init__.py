"""The ``mkernel`` command: one module per subcommand, mounted by ``main``."""
