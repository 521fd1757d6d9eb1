"""What the tests of the guest of ``make test-rxe`` share. Elsewhere there is no rxe device.

Importing torch takes 25 s in the guest, which is emulated, and no NIC needs it: there, mkernel's
modules are imported without the package's ``__init__``, which imports torch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DEVICE = "rxe0"
IN_GUEST = Path("/sys/class/infiniband", DEVICE).exists()
only_in_guest = pytest.mark.skipif(not IN_GUEST, reason=f"no {DEVICE}; make test-rxe has one")

if IN_GUEST and "mkernel" not in sys.modules:
    _spec = importlib.util.find_spec("mkernel")
    assert _spec is not None, "mkernel is not installed"
    sys.modules["mkernel"] = importlib.util.module_from_spec(_spec)  # and not executed
