"""Ring attention: causality, grouped queries, scale, log-sum-exp; in every layout that is claimed."""

from __future__ import annotations

import torch

from mkernel.cases import Case
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import typical, with_tensors
from mkernel.conformance.ranks import each_case, judge_calls

_OP = "ring_attention"


def _judge(subject: AcceleratorSubject, variants: list[dict[str, int]]) -> None:
    subject.claimed(_OP)
    wanted = subject.worlds((1, 3), *([] if subject.quick else [(1, 1), subject.largest()]))
    for world in _worlds(subject, *wanted):
        size = world[0] * world[1]
        cases = [
            typical(
                subject,
                _OP,
                size,
                {**sizes, "sequence": sizes.get("sequence", 24) * size},
                options={} if layout == "heads" else {"lies": layout},
            )
            for sizes in variants
            for layout in subject.capabilities.attention_layouts
        ]
        subject.judge(each_case, judge_calls, cases, 2, world=world)


def _worlds(subject: AcceleratorSubject, *wanted: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Those of the worlds in which the op is claimed; of one node, where it is on no other."""
    found = [each for each in wanted if subject.capabilities.provides(_OP, each[0])]
    return tuple(dict.fromkeys(found)) or subject.worlds((1, 2))


def causal(subject: AcceleratorSubject) -> None:
    """Zigzag splits of short and longer sequences, with chunks that cross the diagonal."""
    _judge(subject, [{"causal": True, "sequence": rows} for rows in (2, 10, 48)])


def gqa(subject: AcceleratorSubject) -> None:
    """1, 2, 3 and 6 heads of keys for 6 of queries."""
    _judge(subject, [{"heads": 6, "kv_heads": kv_heads} for kv_heads in (1, 2, 3, 6)])


def lse(subject: AcceleratorSubject) -> None:
    """Scales other than the default, causal or not; scores of hundreds must not overflow."""
    subject.claimed(_OP)
    for world in _worlds(subject, *subject.usual_worlds()):
        size = world[0] * world[1]
        cases: list[Case] = [
            typical(subject, _OP, size, {"causal": causal}, options={"scale": scale})
            for scale in (0.05, 1.0, -0.3)
            for causal in (False, True)
        ]
        cases.append(_large(typical(subject, _OP, size)))
        subject.judge(each_case, judge_calls, cases, 1, world=world)


def _large(case: Case) -> Case:
    """Scores of some hundreds: without subtracting the maximum, exp overflows."""
    batch, heads, kv, length, width = (
        case.sizes[n] for n in ("batch", "heads", "kv_heads", "sequence", "head_dim")
    )
    random = torch.Generator().manual_seed(case.seed)
    return with_tensors(
        case,
        q=8 * torch.randn(batch, heads, length, width, generator=random),
        k=8 * torch.randn(batch, kv, length, width, generator=random),
        v=torch.randn(batch, kv, length, width, generator=random),
    )


CHECKS = (
    Check("causal", "no position sees a later one, and every earlier one counts", causal),
    Check("gqa", "query head h uses key head h * Hkv // Hq", gqa),
    Check("lse", "the log-sum-exp is that of the scaled scores, however large", lse),
)
