"""Whether a backend can be used on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Whether a backend or provider can be used here; if not, why, and the one thing to do."""

    usable: bool
    detail: str
    remedy: str = ""
