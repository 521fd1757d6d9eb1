"""Planning for H100s, and importing, where this build has no native module of CUDA or Hopper."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run
from machine_files import machine_file

from mkernel.cli.plan import command
from mkernel.errors import INSTALL_AGAIN
from mkernel.plan import ops

_PROGRAM = """
import json, sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.rpartition(".")[2] in ("_kernels", "_cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())
from typer.testing import CliRunner
from mkernel.cli.main import app

import importlib, pkgutil

from mkernel.backends.accelerators import cuda
from mkernel.backends.accelerators import hopper, streams

for package in (cuda, hopper, streams):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.rpartition(".")[2] not in ("_kernels", "_cuda"):
            importlib.import_module(module.name)
for arguments in json.loads(sys.argv[1]):
    found = CliRunner().invoke(app, arguments)
    print(json.dumps([found.exit_code, found.output, repr(found.exception)]))
"""


@pytest.fixture(scope="module")
def not_built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return each command's exit code, output and error where neither module can be imported, by
    name."""
    folder = tmp_path_factory.mktemp("elsewhere")
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    asked = {name: plan_of(folder, name) for name in PLANNED}
    asked |= {"doctor": ["doctor", "--json"], "run": ["run", "ag_gemm", "--accelerator", "hopper"]}
    environment = {"PATH": "", "CUDA_HOME": str(folder / "cuda"), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([*asked.values()])],
        capture_output=True, text=True, timeout=120, check=True, env=environment,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(asked, map(tuple, lines), strict=True))


PLANNED = {
    "auto": ("auto", "ag_gemm"),
    "streams": ("streams", "ag_gemm"),
    **{op: ("hopper", op) for op in ops.OPS},
    "scaled": ("hopper", "gemm_rs", "--dtype", "float8_e4m3"),
    "two nodes": ("hopper", "ag_gemm", "--nodes", "2"),
}


def plan_of(folder: Path, name: str) -> list[str]:
    accelerator, *call = PLANNED[name]
    file = str(machine_file("p5.hwloc", folder))
    where = ("--accelerator", accelerator, "--topology", file, "--nodes", "1", "--json")
    return ["plan", *where, *call]


@pytest.mark.parametrize("name", PLANNED)
def test_plans_are_those_of_a_build_with_the_kernels(
    name: str, not_built: dict[str, tuple[int, str, str]], tmp_path: Path
) -> None:
    code, printed, error = not_built[name]
    assert code == 0, error
    report = json.loads(printed)
    assert report["plan"]["accelerator"] == ("streams" if name == "streams" else "hopper")
    here = json.loads(run(command, *plan_of(tmp_path, name)[1:]))
    assert report["plan"] == here["plan"]


def test_doctor_does_not_ask_for_a_compiler_that_it_has_found(
    not_built: dict[str, tuple[int, str, str]],
) -> None:
    _, printed, _ = not_built["doctor"]
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(printed)["rows"]}
    assert rows["nvcc"]["usable"]
    assert "not built" in rows["hopper"]["detail"]
    assert "install the CUDA toolkit" not in rows["hopper"]["remedy"]
    assert rows["nvcc"]["detail"] in rows["hopper"]["remedy"]
    assert INSTALL_AGAIN in rows["hopper"]["remedy"]


def test_what_was_not_built_is_not_launched(not_built: dict[str, tuple[int, str, str]]) -> None:
    code, _, error = not_built["run"]
    assert code == 1
    assert "BackendUnavailable" in error
    assert "accelerator 'hopper': not built" in error
    assert INSTALL_AGAIN in error
