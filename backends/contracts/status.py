"""The verdict on whether a backend can be used on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """A verdict on a backend or provider: if it cannot be used here, why, and the one thing to do."""

    usable: bool
    detail: str
    remedy: str = ""
