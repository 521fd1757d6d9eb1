"""Worlds of GPU ranks and CPU ranks: ``hopper`` beside ``streams`` on the CPU, and beside the simulator
of ``ascend``. One GPU is enough; two GPU ranks share it with MKERNEL_RANKS_PER_DEVICE=2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_buffers import takes_ranks
from in_world import survivors
from unlike_ranks import case, judge_refusals, refused, wrong_results

import mkernel
from mkernel.conformance.ranks import judge_calls
from mkernel.world.mixed import Mixed

pytestmark = [takes_ranks(1), pytest.mark.usefixtures("leaves_nothing")]
TIMEOUT_S = 60.0
pairs = pytest.mark.parametrize("pair", ["hopper+streams", "ascend+hopper"])


@pytest.fixture(autouse=True)
def _streams_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_STREAMS_DEVICE", "cpu")


def world(pair: str, ranks: int = 1) -> dict[str, Any]:
    return {
        "nodes": 2, "ranks_per_node": ranks, "accelerator": pair, "nic": "cx7", "verbs": "soft",
        "timeout_s": TIMEOUT_S,
    }  # fmt: skip


def devices() -> tuple[str, list[str]]:
    """The device of this rank's tensors, and what was wrong on it."""
    return mkernel.world().accelerator.device, wrong_results("bfloat16")


@pairs
@pytest.mark.parametrize("path", ["auto", "fused"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=takes_ranks(2))])
def test_ops_of_gpu_and_cpu_ranks(
    pair: str, ranks: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_PATH", path)
    kinds = ["cuda" if name == "hopper" else "cpu" for name in pair.split("+")]
    wanted = [(kind, []) for kind in kinds for _ in range(ranks)]
    assert mkernel.launch(devices, **world(pair, ranks)) == wanted


def test_what_they_cannot_do_is_refused_by_name() -> None:
    judge_refusals(mkernel.launch(refused, **world("hopper+streams")), "hopper")


@pytest.mark.parametrize("victim", [0, 1], ids=["gpu", "cpu"])
def test_the_other_side_hears_of_a_rank_that_dies(victim: int) -> None:
    given = world("hopper+streams")
    for kind, seconds, message in survivors(case("gemm_all_reduce"), victim, "kill", **given):
        assert kind == "PeerFailure"
        assert f"rank {victim}" in message
        assert seconds < TIMEOUT_S / 2


@takes_ranks(2)
def test_a_gpu_rank_that_stays_away_is_named_by_all() -> None:
    """The kernels of the other GPU rank of its node find out, which call it by its number there."""
    given = world("ascend+hopper", ranks=2)
    for kind, _, message in survivors(case("gemm_all_reduce"), 3, "absent", **given):
        assert kind == "Timeout"
        assert "rank 3" in message.lower()


def with_one_shifted() -> list[str]:
    """Plant a wrong row in what crosses to the GPU rank, in pinned host memory."""
    if mkernel.world().accelerator.device == "cuda":
        plain = Mixed._here

        def shifted(self: Mixed, part: torch.Tensor, tensors: Any) -> torch.Tensor:
            return plain(self, part.roll(1, 0), tensors)

        Mixed._here = shifted  # type: ignore[method-assign]
    return [*judge_calls(case("all_gather_gemm"), 1)]


def test_a_planted_shift_of_a_row_is_found() -> None:
    on_gpu, on_cpu = mkernel.launch(with_one_shifted, **world("hopper+streams"))
    assert "wrong" in on_gpu[0]
    assert on_cpu == []


def beside_another_stream() -> list[str]:
    """Call from a stream on which the inputs are made late, and read results on it."""
    here = mkernel.world()
    if here.accelerator.device == "cpu":
        return calls_of(range(6))
    with torch.cuda.stream(torch.cuda.Stream()):
        return calls_of(range(6), hold=True)


def calls_of(seeds: range, *, hold: bool = False) -> list[str]:
    here, found = mkernel.world(), []
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        a = torch.randn(8 * here.size, 64, generator=draw).half()
        b = torch.randn(64, 32, generator=draw).half()
        rows = a.chunk(here.size)[here.rank].to(here.accelerator.device)
        late = torch.full_like(rows, float("nan"))
        if hold:
            torch.cuda._sleep(20_000_000)
        late.copy_(rows)
        out = mkernel.all_gather_gemm(late, b.to(late.device))
        error = (out.double().cpu() - a.double() @ b.double()).abs().max()
        if not error < 0.1:
            found.append(f"call {seed}: off by {error}")
    return found


def test_calls_follow_the_callers_stream() -> None:
    assert mkernel.launch(beside_another_stream, **world("hopper+streams")) == [[], []]
