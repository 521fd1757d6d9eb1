"""The faults of worlds: each kind, the worlds that it may happen to, and the outcome it must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Stage = Literal["join", "calls", "leave"]
"""What ranks are about when a fault strikes."""


class WorldKind(NamedTuple):
    """The properties of a world on which a fault may depend."""

    nodes: int
    ranks_per_node: int
    accelerator: str

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def through_a_nic(self) -> bool:
        """Return whether puts go through the software device: ``streams`` goes through a process
        group."""
        return self.nodes > 1 and self.accelerator == "ascend"


def _of_several(world: WorldKind) -> bool:
    return world.size > 1


def _of_several_hosts(world: WorldKind) -> bool:
    return world.nodes > 1 and world.accelerator == "streams"  # no NIC of ours joins hosts here


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        raised: the errors of which all ranks that are left must raise one and the same; empty: they
            must raise none, and every result must be right.
        maybe: whether it may also pass unnoticed, everything then being right.
        dies: whether its victims do. own: whether a victim raises an error of its own, whatever it is.
        by: who strikes: the ``driver`` from outside, the victim (``rank``), or its software ``device``.
        stages: when it may strike. happens_to: which worlds.
        short_deadline: whether what it comes to is found by a deadline, which then is short.
        weight: how often it is drawn, compared with the others.
    """

    raised: frozenset[str] = frozenset()
    maybe: bool = False
    dies: bool = False
    own: bool = False
    by: Literal["driver", "rank", "device"] = "rank"
    stages: tuple[Stage, ...] = ("calls",)
    happens_to: Callable[[WorldKind], bool] = _of_several
    short_deadline: bool = False
    weight: float = 1.0


def _kind(*raised: str, **fields: object) -> Kind:
    return Kind(frozenset(raised), **fields)  # type: ignore[arg-type]


_AFTER_JOIN: tuple[Stage, ...] = ("calls", "calls", "calls", "leave")
_ANY_TIME: tuple[Stage, ...] = ("join", "calls", "calls", "leave")
_LIMIT = {"maybe": True, "own": True, "stages": ("join", "calls"), "happens_to": lambda world: True}
_DEVICE = {"by": "device", "happens_to": lambda world: world.through_a_nic}

KINDS: dict[str, Kind] = {
    "none": _kind(happens_to=lambda world: True, weight=3.0),
    "killed": _kind("PeerFailure", dies=True, by="driver", stages=_AFTER_JOIN, weight=2.0),
    "killed-joining": _kind(
        "PeerFailure", "Timeout", dies=True, by="driver", stages=("join",), weight=0.15
    ),
    "stopped-joining": _kind("PeerFailure", "Timeout", by="driver", stages=("join",), weight=0.15),
    "stopped-briefly": _kind(by="driver", stages=_ANY_TIME),
    "stopped-for-long": _kind("Timeout", by="driver", short_deadline=True),
    "host-killed": _kind(
        "PeerFailure", dies=True, by="driver", happens_to=_of_several_hosts, weight=0.5
    ),
    "host-stopped": _kind("PeerFailure", by="driver", happens_to=_of_several_hosts, weight=0.5),
    "interrupted": _kind("Cancelled", own=True, by="driver"),
    "store-lost": _kind("PeerFailure", by="driver", weight=0.5),
    "raises": _kind("PeerFailure", own=True),
    "absent": _kind("Timeout", short_deadline=True),
    "differs": _kind(),
    "link-dropped": _kind("NicError", **_DEVICE),
    "link-cut": _kind("NicError", **_DEVICE),
    "device-stalled": _kind("NicError", "Timeout", short_deadline=True, **_DEVICE),
    "queue-pair-error": _kind("NicError", **_DEVICE),
    "queue-overflow": _kind("NicError", **_DEVICE),
    "link-back-in-time": _kind(**_DEVICE),
    "files-exhausted": _kind("PeerFailure", "NicError", **_LIMIT),
    "memory-exhausted": _kind("PeerFailure", "NicError", **_LIMIT),
    "threads-exhausted": _kind("PeerFailure", "NicError", **_LIMIT),
    "disk-full": _kind("PeerFailure", "NicError", **_LIMIT),
}
"""By name. ``differs``: one rank calls with another shape, which all refuse, and the world goes on. A
limit that a rank's NIC meets is an error of that NIC, on all ranks."""

DEVICE_FAULTS = {
    "link-dropped": ("drop@{count}",),
    "link-cut": ("cut@{count}", "cut@{ms}ms"),
    "device-stalled": ("stall@{count}",),
    "queue-pair-error": ("qp-error@{count}",),
    "queue-overflow": ("cq-overflow@{count}",),
    "link-back-in-time": ("cut@{count}+40ms", "cut@{ms}ms+40ms", "stall@{count}+40ms"),
}
"""What the software device is told, as ``MKERNEL_SOFTVERBS_FAULTS`` takes it."""


@dataclass(frozen=True)
class Fault:
    """One fault of one world.

    Attributes:
        kind: its name in ``KINDS``. victims: ranks.
        stage, delay_s: of one that the driver strikes with: so long after every rank was there.
        call: before which a victim's own begins. amount: of what a limit leaves, 0 to 1.
        device: what the victim's software device is told.
    """

    kind: str
    victims: tuple[int, ...] = ()
    stage: Stage = "calls"
    delay_s: float = 0.0
    call: int = 0
    amount: float = 0.0
    device: str = ""

    @property
    def of(self) -> Kind:
        return KINDS[self.kind]

    @property
    def resumes(self) -> bool:
        """Return whether its victims are stopped until the others have made another world."""
        return self.kind in ("stopped-for-long", "stopped-joining", "host-stopped")

    def __str__(self) -> str:
        if self.kind == "none":
            return "no fault"
        when = f"{self.delay_s:.3f} s into {self.stage}" if self.of.by == "driver" else self.device
        if self.of.by == "rank":
            when = f"before call {self.call} of {self.stage}"
        left = (
            f", {self.amount:.2f} left" if "exhausted" in self.kind or "full" in self.kind else ""
        )
        return f"{self.kind} of rank {', '.join(map(str, self.victims))} ({when}{left})"
