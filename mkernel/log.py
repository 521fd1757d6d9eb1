"""mkernel's log: loggers of Python's ``logging`` below ``mkernel``, quiet unless somebody listens.

``MKERNEL_LOG=info`` shows what they say on stderr. A program that configures ``logging`` itself gets
the same records, whose ``rank`` and ``world`` say where they come from.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Literal

Level = Literal["debug", "info", "warning"]

_root = logging.getLogger("mkernel")
_root.addHandler(logging.NullHandler())

_shown = logging.StreamHandler()
_shown.setFormatter(
    logging.Formatter(
        "%(asctime)s %(levelname)s %(name)s rank %(rank)s world %(world)s: %(message)s",
        defaults={"rank": os.environ.get("RANK", "-"), "world": "-"},
    )
)


def show(level: Level | None) -> None:
    """Show records from a level on, on stderr; None: show none there. A program's own handlers stay as
    they are."""
    if level is not None:
        _root.addHandler(_shown)
        _root.setLevel(level.upper())
    elif _shown in _root.handlers:
        _root.removeHandler(_shown)
        _root.setLevel(logging.NOTSET)


def of_world(name: str, rank: int, world: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return the logger of a module, whose records name a rank and its world."""
    return logging.LoggerAdapter(logging.getLogger(name), {"rank": rank, "world": world})


def warn(name: str, message: str) -> None:
    """Warn of what a user should know of: in the log where it is shown, else as Python's warning, which
    is seen without any setting. ``name``: of the module."""
    if _shown in _root.handlers:
        logging.getLogger(name).warning(message)
    else:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
