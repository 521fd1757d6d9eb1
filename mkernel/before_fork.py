"""What ranks would each look up for themselves: the fork server imports this module last."""

from __future__ import annotations

from mkernel.backends.registry import ACCELERATORS, NICS
from mkernel.installed import points

for _group in (ACCELERATORS, NICS):
    points(_group)
