"""The first import of the fork server, which disables garbage collection while it imports, because
everything it imports stays. ``before_fork`` enables it again."""

from __future__ import annotations

import gc

gc.disable()
