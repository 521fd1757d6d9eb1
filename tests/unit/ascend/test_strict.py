"""Strict simulation of whole calls: sound kernels pass with the same bits whatever the seed; a flag
or a signal that is left out is reported. Classes of hazards one by one: tests/native/ascend."""

from __future__ import annotations

import re

import pytest

from mkernel.backends.accelerators.ascend import AscendAccelerator, AscendLaunch, _ascend
from mkernel.backends.transport._transport import AbortCode
from mkernel.plan.model import OpName

from .rig import PATIENCE_S, World, make_plan, same_bits


@pytest.mark.parametrize(
    ("op", "nodes", "ranks", "out_dtype"),
    [
        ("all_gather_gemm", 1, 1, "float32"),
        ("all_gather_gemm", 1, 3, "float32"),
        ("all_gather_gemm", 2, 2, "float16"),
        ("gemm_reduce_scatter", 2, 2, "float32"),
        ("gemm_reduce_scatter", 2, 2, "float16"),
        ("gemm_all_reduce", 2, 2, "float32"),
        ("gemm_all_reduce", 2, 2, "float16"),
    ],
)
def test_same_bits_in_any_legal_order(op: OpName, nodes: int, ranks: int, out_dtype: str) -> None:
    """No hazard, and the same results."""
    plan = make_plan(
        130 * nodes * ranks, 304, 520, op=op, nodes=nodes, ranks_per_node=ranks,
        out_dtype=out_dtype, compute_blocks=3, comm_blocks=2,
    )  # fmt: skip
    results = []
    for strict in (None, *(_ascend.Strict(seed=seed) for seed in (None, 1, 2, 3, 2**64 - 1))):
        with World(plan, strict=strict) as world:
            world.poison()
            results.append([out for e in range(3) for out in world.call(world.tensors(seed=e))])
    assert same_bits(results)


def launches(world: World, timeout_s: float) -> list[AscendLaunch]:
    world.epoch += 1
    tensors = world.tensors(seed=1)
    return [world.launch(rank, each, timeout_s=timeout_s) for rank, each in enumerate(tensors)]


@pytest.mark.parametrize("seed", [None, 7])
def test_a_missing_flag_is_reported_with_its_source_line(seed: int | None) -> None:
    """8: the wait of the flag between the loads of A and B and the extracts."""
    strict = _ascend.Strict(seed=seed, skip_core=2, skip=[8])
    with World(make_plan(512, 512, 512), strict=strict) as world:
        (launch,) = launches(world, timeout_s=300)
        with pytest.raises(
            RuntimeError,
            match=r"rank 0 AIC core 2, TEXTRACT \(pipe MTE1, product\.hpp:\d+\): "
            r"reads L1\[262144, \d+\) while TLOAD \(pipe MTE2, product\.hpp:\d+\) may still write it",
        ):
            launch.wait(PATIENCE_S)


def test_cores_that_wait_for_one_that_has_returned_are_reported_at_once() -> None:
    """Core 20 of 24 has no tile: 10 flags, a fence, then its signal that it has finished."""
    strict = _ascend.Strict(skip_core=20, skip=[11])
    with World(make_plan(256, 256, 512, ranks_per_node=2), strict=strict) as world:
        for rank, launch in enumerate(launches(world, timeout_s=300)):
            with pytest.raises(
                RuntimeError,
                match=rf"rank {rank}, deadlock: .* AIC core 0 for signal \d+ of rank {rank} to be "
                r"24, now 23 \(release\.hpp:\d+\)",
            ):
                launch.wait(PATIENCE_S)


def test_a_signal_that_a_peer_never_raises_is_a_time_out_with_every_waiting_core() -> None:
    """Vector core 0 sends the only chunk, fences, and does not say so."""
    strict = _ascend.Strict(skip_role="comm", skip=[1])
    with World(make_plan(512, 256, 512, ranks_per_node=2), strict=strict) as world:
        for rank, launch in enumerate(launches(world, timeout_s=0.5)):
            assert launch.wait(PATIENCE_S)
            code, seen = world.outcome(rank)
            assert (code, seen.peer) == (AbortCode.timeout, 1 - rank)
            report = launch._native.at_deadline
            assert re.search(
                rf"AIC core {seen.core} for signal {seen.signal} of rank {seen.peer} to be "
                rf"{seen.wanted}, now {seen.seen} \(\w+\.hpp:\d+\)",
                report,
            ), report


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_missing_wait_for_another_core_of_the_rank_is_reported(
    op: OpName, seed: int | None
) -> None:
    """Vector core 0 sends its first chunk without waiting until cube cores have computed it:
    reported by whichever of the two comes second."""
    strict = _ascend.Strict(seed=seed, skip_role="comm", skip_waits=[0])
    plan = make_plan(512, 512, 512, op=op, ranks_per_node=2, comm_blocks=4)
    with World(plan, strict=strict) as world:
        for launch in launches(world, timeout_s=300):
            with pytest.raises(
                RuntimeError,
                match=r"rank \d (AIV core 0, TPUT .* which rank \d AIC core \d+ writes in TSTORE|"
                r"AIC core \d+, TSTORE .* which rank \d AIV core 0 reads in TPUT)"
                r".*: no signal orders the two cores; a TNOTIFY or a TWAIT is missing",
            ):
                launch.wait(PATIENCE_S)


def test_the_settings_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (False, True):
        monkeypatch.setenv("MKERNEL_ASCEND_STRICT", str(wanted))
        monkeypatch.setenv("MKERNEL_ASCEND_SEED", "5")
        assert (AscendAccelerator()._strict is not None) == wanted
