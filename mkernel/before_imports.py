"""The fork server imports this module first: garbage is not looked for among what it imports, which all
stays. ``before_fork`` begins with it again."""

from __future__ import annotations

import gc

gc.disable()
