"""Peers that are built from source by who wants them: in their place is why they take no part."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.harness import contenders
from mkernel.harness.contenders import deep_ep, deep_gemm


def problem(op: str, **other: Any) -> Any:
    case = SimpleNamespace(dtype="bfloat16", options={})
    device = SimpleNamespace(type="cuda")
    return SimpleNamespace(
        **{"op": op, "case": case, "device": device, "world": 2, "bars_libraries": None} | other
    )


@pytest.mark.parametrize(
    "op", ["moe_dispatch", "moe_dispatch_gemm", "moe_gemm_combine", "moe_layer"]
)
def test_why_it_takes_no_part(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deepep" in contenders.PEERS
    peer = contenders.named("deepep")
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: None)
    assert "is not installed: it is built from source" in str(peer.unusable(problem(op)))
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: object())
    assert peer.unusable(problem(op)) is None
    for other, why in (
        ({"device": SimpleNamespace(type="cpu")}, "not on CPUs"),
        ({"bars_libraries": "would go past the NIC"}, "would go past the NIC"),
        ({"case": SimpleNamespace(dtype="float16", options={})}, "adds bfloat16 alone"),
        ({"world": 3}, "for 2, 4 or 8 ranks"),
    ):
        assert peer.unusable(problem(op, **other)) == why
    assert peer.unusable(problem("all_reduce")) == "for experts"


@pytest.mark.parametrize("op", ["moe_dispatch_gemm", "moe_gemm_combine", "moe_layer"])
def test_why_deep_gemm_takes_no_part(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gather+deepgemm" in contenders.PEERS
    peer = contenders.named("gather+deepgemm")
    scaled = SimpleNamespace(options={"scales": "block"})
    monkeypatch.setattr(deep_gemm, "find_spec", lambda name: None)
    assert "is not installed: pip install" in str(peer.unusable(problem(op, case=scaled)))
    monkeypatch.setattr(deep_gemm, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "deep_gemm does not load: " in str(peer.unusable(problem(op, case=scaled)))
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    assert peer.unusable(problem(op, case=scaled)) is None
    assert (
        peer.unusable(problem(op, case=scaled, device=SimpleNamespace(type="cpu"))) == "not on CPUs"
    )
    plain = SimpleNamespace(options={})
    assert peer.unusable(problem(op, case=plain)) == "for products of experts in e4m3"
