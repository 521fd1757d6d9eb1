"""What is imported when: planning and probing take no torch; the API looks the same all the same."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mkernel

P2P = """<topology version="2.0"><object type="Machine"><object type="Package" os_index="0">
<object type="NUMANode" os_index="0"/></object></object></topology>"""


ELSEWHERE = Path("/")
"""In the repository the flat folder would be imported."""


def python(*lines: str, cwd: Path = ELSEWHERE) -> str:
    """What a fresh interpreter prints; it fails the test if it fails."""
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def without_torch(*command: str, cwd: Path = ELSEWHERE) -> str:
    """What the command prints; it must not have imported torch."""
    return python(
        "import sys",
        f"sys.argv = ['mkernel', *{command!r}]",
        "from mkernel.cli.main import main",
        "try:",
        "    main()",
        "except SystemExit as end:",
        "    assert not end.code, end.code",
        "assert 'torch' not in sys.modules, 'torch was imported'",
        cwd=cwd,
    )


def test_the_package_alone_imports_no_torch() -> None:
    python("import sys, mkernel", "assert 'torch' not in sys.modules")
    python("import sys, mkernel", "mkernel.world", "assert 'torch' in sys.modules")


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes", "1", "--ranks-per-node", "4", "--accelerator", "streams"),
        ("--nodes", "2", "--nic", "efa", "--explain", "--simulate"),
    ],
    ids=" ".join,
)
def test_planning_imports_no_torch(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_STREAMS_DEVICE", "cpu")
    assert "predicted" in without_torch("plan", "ag_gemm", *options)


def test_planning_for_real_machines_imports_no_torch(tmp_path: Path) -> None:
    machine = (
        '{"nodes": [{"id": 0, "hostname": "a", "numa": [], "accelerators": ['
        '{"id": "cuda0", "kind": "cuda", "name": "GPU", "index": 0},'
        '{"id": "cuda1", "kind": "cuda", "name": "GPU", "index": 1}], "nics": []}]}'
    )
    (tmp_path / "machine.json").write_text(machine)
    told = without_torch(
        "plan", "ag_gemm", "--topology", "machine.json", "--nodes", "1", "--ranks-per-node", "2",
        "--dtype", "bfloat16", cwd=tmp_path,
    )  # fmt: skip
    assert "on hopper" in told


def test_probing_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_STREAMS_DEVICE", "cpu")
    assert without_torch("probe")


def test_probing_a_file_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "machine.xml").write_text(P2P)
    assert without_torch("probe", "--from", "machine.xml", cwd=tmp_path)


# ---- the API ----------------------------------------------------------------------------------------


def test_every_name_is_there() -> None:
    assert set(mkernel.__all__) <= set(dir(mkernel))
    for name in mkernel.__all__:
        assert getattr(mkernel, name) is not None
    assert set(mkernel.__all__) == {*mkernel.HOMES, "Settings", "errors", "__version__"}
    with pytest.raises(AttributeError, match="'nonsense'"):
        mkernel.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_checkers_see_what_there_is() -> None:
    """The imports that only type checkers read name the same things from the same places."""
    tree = ast.parse(Path(str(mkernel.__file__)).read_text())
    (checked,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for name, (module, _) in seen.items() if module == "mkernel"} == mkernel.SUBMODULES
    seen = {name: home for name, home in seen.items() if name not in mkernel.SUBMODULES}
    assert {name: module for name, (module, _) in seen.items()} == mkernel.HOMES
    for name, (module, defined) in seen.items():
        assert getattr(mkernel, name) is getattr(importlib.import_module(str(module)), defined)


def test_public_packages_are_there_once_they_are_used() -> None:
    """``import mkernel`` alone makes them available, and does not import them."""
    names = sorted(mkernel.SUBMODULES - {"backends"})
    assert "nn" in names
    python(
        "import sys, mkernel",
        f"names = {names!r}",
        "assert set(names) <= set(dir(mkernel))",
        "assert not {f'mkernel.{name}' for name in names if name != 'topology'} & set(sys.modules)",
        "for name in names:",
        "    assert getattr(mkernel, name).__name__ == f'mkernel.{name}'",
        "mkernel.nn.ColumnParallelLinear",
    )


def test_a_function_stays_where_a_submodule_has_its_name() -> None:
    python(
        "import mkernel",
        "import mkernel.plan.model",
        "import mkernel.launch, mkernel.plan.planner, mkernel.world",
        "for name in ('launch', 'plan', 'world'):",
        "    assert type(getattr(mkernel, name)).__name__ == 'function', name",
        "from mkernel import *",
        "assert callable(plan) and callable(launch) and callable(world)",
    )


def test_the_package_pickles_by_name() -> None:
    """Functions of a script travel to Ray's actors with the modules that they use."""
    assert pickle.loads(pickle.dumps(mkernel)) is mkernel
