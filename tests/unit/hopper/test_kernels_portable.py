"""Read what nvcc makes of the portable kernels for devices before Hopper: nothing here runs them, so
only their code shows that it asks for nothing later."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNITS = (
    "kernels/collectives/mail",
    "kernels/moe/push_wanted",
    "kernels/moe/quantise_rows",
    "kernels/moe/routing",
    "kernels/rendezvous",
    "transfer/transfer",
)
"""Together they have all that differs: fences, early grids, prefetches, clusters, e4m3, bulk copies."""
LATER_PTX = re.compile(
    r"cp\.async\.bulk|mbarrier|fence\.proxy|griddepcontrol|cluster|cvt\S*e4m3|elect\.sync"
)
LATER_CODE = re.compile(r"ACQBULK|PREEXIT|UBLK|SYNCS|UCGABAR|FENCE\.VIEW|EXPLICIT_CLUSTER|E4M3")


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_code_for_older_devices_has_nothing_later(unit: str, tmp_path: Path) -> None:
    """Look for what Hopper's code of the same kernels has. Machine code is read where nvdisasm is
    installed; ptxas, which made it, refuses PTX that a device lacks."""
    older, newer = _compiled(unit, "80", tmp_path), _compiled(unit, "90a", tmp_path)
    ptx, later = (each.with_suffix(".ptx").read_text() for each in (older, newer))
    assert re.findall(r"^\.target (\S+)", ptx, re.MULTILINE) == ["sm_80"]
    assert LATER_PTX.findall(ptx) == []
    assert LATER_PTX.search(later)
    assert ptx.count(".entry") == later.count(".entry") > 0
    if shutil.which("nvdisasm") is not None:
        assert LATER_CODE.findall(_run("nvdisasm", str(older))) == []
        assert LATER_CODE.search(_run("nvdisasm", str(newer)))


def _compiled(unit: str, architecture: str, folder: Path) -> Path:
    """Return the machine code of a unit; its PTX lies beside it."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    made = folder / architecture / Path(unit).with_suffix(".cubin").name
    made.parent.mkdir()
    _run(
        "nvcc", "-I", str(ROOT), "-std=c++20", "-O3", "--expt-relaxed-constexpr",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-cubin",
        "--keep", "--keep-dir", str(made.parent), "-o", str(made),
        str(ROOT / f"backends/accelerators/cuda/{unit}.cu"),
    )  # fmt: skip
    return made


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
