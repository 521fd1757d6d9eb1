"""What ranks would each look up for themselves: the fork server imports this module last.

Whatever it has imported stays. Ranks that looked for garbage would look through all of that too, and
write to each object's page: each would have a copy of its own.
"""

from __future__ import annotations

import gc

from mkernel.backends.registry import ACCELERATORS, NICS
from mkernel.installed import points

for _group in (ACCELERATORS, NICS):
    points(_group)
gc.freeze()
gc.enable()
