"""What the tests of the guest of ``make test-rxe`` share. Elsewhere there is no rxe device.

Importing torch takes 25 s in the guest, which is emulated, and no NIC needs it: nothing that is
imported there may.
"""

from __future__ import annotations

import importlib.machinery
import os
from pathlib import Path

import pytest

DEVICE = "rxe0"
IN_GUEST = Path("/sys/class/infiniband", DEVICE).exists()
only_in_guest = pytest.mark.skipif(not IN_GUEST, reason=f"no {DEVICE}; make test-rxe has one")

_DEBIANS = Path(os.environ.get("PYVERBS", "/none"), "pyverbs")
only_with_pyverbs = pytest.mark.skipif(
    IN_GUEST and not (_DEBIANS / f"device{importlib.machinery.EXTENSION_SUFFIXES[0]}").exists(),
    reason=f"Debian's pyverbs is for another Python; in {_DEBIANS}",
)
"""Where it is for this Python it must import."""
