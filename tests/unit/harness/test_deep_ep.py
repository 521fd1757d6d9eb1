"""A peer that could be built nowhere has a reason in its place, whatever is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.harness import contenders, deep_ep


@pytest.mark.parametrize("op", ["moe_dispatch_gemm", "moe_gemm_combine", "moe_layer"])
def test_why_it_takes_no_part(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem: Any = SimpleNamespace(op=op)
    assert "deepep" in contenders.PEERS
    peer = contenders.named("deepep")
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: None)
    assert "is not installed: it is built from source" in str(peer.unusable(problem))
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: object())
    assert "nothing here calls it yet" in str(peer.unusable(problem))
    other: Any = SimpleNamespace(op="all_reduce")
    assert peer.unusable(other) == "for products of experts"
