"""The decisions of the pass about the collectives that it met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Decision:
    """One collective of a compiled graph.

    Attributes:
        collective: its name in ``torch.ops._c10d_functional``.
        group: torch's name of its group.
        op: the op of ``torch.ops.mkernel`` that replaced it; None: it was left.
        why: the reason why it was left; empty if it was replaced.
    """

    collective: str
    group: str
    op: str | None = None
    why: str = ""


@dataclass
class Report:
    """The collectives that have been rewritten, and left, since async tensor parallelism was
    enabled."""

    decisions: list[Decision] = field(default_factory=list)

    @property
    def rewritten(self) -> Counter[str]:
        """The number of times that each op has replaced a collective, by the op's name."""
        return Counter(each.op for each in self.decisions if each.op is not None)

    @property
    def left(self) -> Counter[tuple[str, str]]:
        """The number of collectives that were left as they are, by their name and the reason."""
        return Counter((each.collective, each.why) for each in self.decisions if each.op is None)

    def __str__(self) -> str:
        """Return a line for each op, and for each reason."""
        rewritten = [f"{count} x {op}" for op, count in sorted(self.rewritten.items())]
        left = [f"left {n} x {name}: {why}" for (name, why), n in sorted(self.left.items())]
        return "\n".join([*rewritten, *left]) or "no collective was met"
