"""What the sanitizers see of every kernel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import checked_kernels
import pytest
import sanitized_kernels
from device_buffers import takes_ranks
from sanitized_kernels import FOUND, NVCC, SANITIZER, run_sanitized

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]


sanitized = pytest.mark.skipif(
    not Path(SANITIZER).exists(), reason="compute-sanitizer is not installed"
)


@sanitized
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "tool", "world"),
    [
        (what, tool, world)
        for what, program in checked_kernels.CHECKED.items()
        for tool, world in program.ranks.items()
    ],
)
def test_sanitizer(tmp_path: Path, what: str, tool: str, world: int) -> None:
    judge_sanitized(tool, [checked_kernels.__file__, what, tool], world, tmp_path)


@sanitized
@pytest.mark.timeout(400)
def test_every_kernel_is_checked(tmp_path: Path) -> None:
    """By each tool that can, in one of the programs above."""
    seen = sanitized_kernels.seen(tmp_path)
    assert sanitized_kernels.missing(seen) == []


@sanitized
@pytest.mark.timeout(400)
def test_initcheck_does_not_see_stores_of_libraries_by_tma() -> None:
    """It takes torch's own product for uninitialised. Once it does not, ``checked_kernels`` needs no
    FlashAttention-2 in the place of cuDNN's attention."""
    program = (
        "import torch; a = torch.randn(512, 512, device='cuda', dtype=torch.bfloat16); "
        "assert (a @ a).float().isfinite().all(); print('right')"
    )
    done = subprocess.run(
        [SANITIZER, "--tool", "initcheck", sys.executable, "-c", program],
        capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip
    assert "right" in done.stdout, done.stdout[:3000] + done.stderr[-2000:]
    assert "Uninitialized __global__ memory read" in done.stdout, done.stdout[-3000:]


@sanitized
@pytest.mark.timeout(400)
def test_initcheck_sees_stores_of_rows_and_none_of_boxes(tmp_path: Path) -> None:
    """The same kernels read results that plain stores wrote, of which the tool says nothing, and
    results that boxes wrote, of which it says that nobody did. They are right in both."""
    by_rows, by_boxes = (
        [checked_kernels.__file__, f"experts_by_{each}", "initcheck"] for each in ("rows", "boxes")
    )
    judge_sanitized("initcheck", by_rows, 1, tmp_path)
    ((status, text),) = run_sanitized("initcheck", by_boxes, 1, tmp_path)
    assert status == FOUND, text[-3000:]
    assert "right" in text, text[-3000:]
    read_by = set(re.findall(r"(\w+_kernel)\b", text))
    assert "send_rows_kernel" in read_by, sorted(read_by)


@sanitized
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path(NVCC).exists(), reason="nvcc is not installed")
def test_racecheck_does_not_see_that_a_lane_frees_for_its_warp(tmp_path: Path) -> None:
    """Once it does, ``checked_kernels`` needs no :data:`WITHOUT_RACECHECK` for experts in e4m3."""
    source = Path(__file__).with_name("racecheck_controls.cu")
    program = str(tmp_path / "controls")
    build = [NVCC, "-std=c++20", "-arch=sm_90a", "-lineinfo", "-I", str(sanitized_kernels.ROOT)]
    subprocess.run([*build, "-o", program, str(source)], check=True, timeout=200)
    for freed_by, hazards in (("each", "0 hazards"), ("one", "1 hazard")):
        done = subprocess.run(
            [SANITIZER, "--tool", "racecheck", program, freed_by],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert "right" in done.stdout, done.stdout[:3000] + done.stderr[-2000:]
        assert f"RACECHECK SUMMARY: {hazards}" in done.stdout, done.stdout[:3000]


def judge_sanitized(tool: str, program: list[str], world: int, folder: Path) -> None:
    """Each rank ends well under the tool, with right results."""
    for status, text in run_sanitized(tool, program, world, folder):
        # What a tool says first tells most; then what the rank made of it.
        assert status == 0, f"{text[:3000]}\n[..]\n{text[-2000:]}"
        assert "right" in text
