"""``python -m mkernel``: the ``mkernel`` command."""

from mkernel.cli.main import main

if __name__ == "__main__":
    main()
