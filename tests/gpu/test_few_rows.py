"""GEMM+AllReduce and GEMM+ReduceScatter of few rows by one kernel, and GEMM+AllReduce of more rows by
one whose tiles leave by mail, through the public API, beside ``test_calls_on_gpus``: which calls take
it, exact sums, faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import calls
import fp8_ranks
import hopper_ranks
import kept_ranks
import mailed_ranks
import norm_ranks
import pytest
from device_buffers import needs_gpus, several, worlds
from families import FEW, IN_TWO_WAVES, NORMED, SCALED, SUMS, TILED
from hopper_ranks import Shape, tilings
from in_world import TOLD_S
from kept_ranks import right
from mailed_ranks import FAULTS

import mkernel

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture(scope="module")
def constants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leave few rows to their kernel wherever it takes them."""
    return norm_ranks.everywhere(tmp_path_factory.mktemp("few_rows") / "constants.json")


@pytest.fixture(autouse=True)
def always(constants_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused path, and the kernel wherever it fits."""
    monkeypatch.setenv("MKERNEL_CONSTANTS", str(constants_file))
    monkeypatch.setenv("MKERNEL_PATH", "fused")


@worlds
def test_that_it_is_this_kernel(world: int) -> None:
    kinds = kept_ranks.run(fp8_ranks.planned, FEW, ranks_per_node=world, accelerator="hopper")
    for found in kinds:
        assert found == ["hopper.few_rows"] * len(FEW)


@several
def test_that_more_rows_are_tiles_of_both_sizes(world: int) -> None:
    for found in kept_ranks.run(tilings, TILED, ranks_per_node=world, accelerator="hopper"):
        assert {*found} == {"wide", "narrow"}, found


@worlds
def test_every_bit_of_exact_sums(world: int) -> None:
    right(world, fp8_ranks.exact, SCALED)


@several
def test_sums_in_float32_are_another_kernels(world: int) -> None:
    """Which moves them into other registers now and then."""
    exact = [replace(shape, fast=False) for shape in SCALED]
    kinds = kept_ranks.run(fp8_ranks.planned, exact, ranks_per_node=world, accelerator="hopper")
    assert not any("few_rows" in kind for found in kinds for kind in found)


@several
@pytest.mark.parametrize("fault", ["scales of other rows", "scales of the call before"])
@pytest.mark.parametrize("shape", [SCALED[0], SCALED[2]], ids=str)
def test_wrong_scales_are_seen(world: int, shape: Shape, fault: str) -> None:
    found = kept_ranks.run(
        fp8_ranks.faulty, "fused", fault, shape, ranks_per_node=world, accelerator="hopper"
    )
    assert all(wrong > 0 for wrong in found)


@worlds
def test_known_calls(world: int) -> None:
    right(world, hopper_ranks.known, [*FEW, *NORMED, IN_TWO_WAVES, *TILED], 24)


@several
def test_zeros_arrive(world: int) -> None:
    right(world, hopper_ranks.of_zeros, [*SUMS, *TILED[:3]])


@several
@pytest.mark.parametrize("shape", [TILED[0], TILED[3], SUMS[4]], ids=str)
def test_faults_of_what_travels_by_mail_are_seen(world: int, shape: Shape) -> None:
    """Each one by every rank that it reaches."""
    by_python = replace(shape, path="fused")
    found = mkernel.launch(
        calls.faulty, [by_python], FAULTS, mailed_ranks.planted,
        ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S,
    )  # fmt: skip
    assert found == [[*FAULTS], *[[*FAULTS[1:]]] * (world - 1)]
