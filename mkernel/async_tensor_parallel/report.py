"""The decisions of the pass about the collectives that it met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mkernel import log


@dataclass(frozen=True)
class Decision:
    """One collective of a compiled graph.

    Attributes:
        collective: its name in ``torch.ops._c10d_functional``.
        group: torch's name of its group.
        op: the op of ``torch.ops.mkernel`` that replaced it; None: it was left.
        calls: how many calls of the op did: several, if it sums several products; none, if those that
            replaced another collective did it too.
        why: the reason why it was left; empty if it was replaced.
    """

    collective: str
    group: str
    op: str | None = None
    why: str = ""
    calls: int = 1


@dataclass
class Report:
    """The collectives that have been rewritten, and left, since async tensor parallelism was
    enabled."""

    decisions: list[Decision] = field(default_factory=list)

    def left_one(self, decision: Decision, beside_product: bool) -> None:
        """Note a collective that was left; the first of its kind beside a product with a warning."""
        kinds = {(each.collective, each.group, each.why) for each in self.decisions}
        kind = (decision.collective, decision.group, decision.why)
        if beside_product and kind not in kinds:
            log.warn(
                __name__,
                f"async tensor parallel leaves {decision.collective} of group {decision.group} "
                f"beside a matrix product: {decision.why}",
            )
        self.decisions.append(decision)

    @property
    def rewritten(self) -> Counter[str]:
        """The number of calls that replaced collectives, by the op's name."""
        found: Counter[str] = Counter()
        for each in self.decisions:
            if each.op is not None:
                found[each.op] += each.calls
        return found

    @property
    def left(self) -> Counter[tuple[str, str]]:
        """The number of collectives that were left as they are, by their name and the reason."""
        return Counter((each.collective, each.why) for each in self.decisions if each.op is None)

    def __str__(self) -> str:
        """Return a line for each op, and for each reason."""
        rewritten = [f"{count} x {op}" for op, count in sorted(self.rewritten.items())]
        left = [f"left {n} x {name}: {why}" for (name, why), n in sorted(self.left.items())]
        return "\n".join([*rewritten, *left]) or "no collective was met"
