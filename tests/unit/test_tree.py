"""The repository's root is a place to work in: what stands there is what is imported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugins" / "native" / "fifo_kernel.cpp"
DATA = {
    "mkernel/topology/data/links.json",
    "mkernel/backends/cuda/chips.json",
    *(f"mkernel/backends/accelerators/{b}/machine.json" for b in ("ascend", "hopper", "streams")),
}
HEADERS = {
    "mkernel/include/backends/contracts/call_starter.h",
    "mkernel/include/backends/transport/atomics.hpp",
    "mkernel/include/backends/transport/call_state.hpp",
    "mkernel/include/backends/transport/channel.hpp",
    "mkernel/include/backends/transport/host_device.hpp",
    "mkernel/include/backends/transport/clock.hpp",
    "mkernel/include/backends/transport/device_wait.cuh",
    "mkernel/include/backends/transport/host_control.hpp",
    "mkernel/include/backends/transport/signal.hpp",
    "mkernel/include/backends/transport/fifo_atomics.hpp",
    "mkernel/include/backends/transport/republish.hpp",
    "mkernel/include/backends/transport/fifo_device.hpp",
    "mkernel/include/backends/transport/fifo_host.hpp",
    "mkernel/include/backends/transport/fifo_slot.hpp",
    "mkernel/include/backends/transport/put_command.hpp",
    "mkernel/include/backends/transport/diagnosis.hpp",
    "mkernel/include/backends/transport/signal_pad.hpp",
    "mkernel/include/backends/transport/shared_word.hpp",
    "mkernel/include/backends/transport/sleep.hpp",
}


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import mkernel.backends.transport._transport, mkernel.topology"),
        ("-m", "mkernel", "--version"),
        ("-m", "pytest", "--collect-only", "-q", "tests/unit/test_errors.py"),
    ],
    ids=["import", "mkernel", "pytest"],
)
def test_python_works_in_the_root(arguments: tuple[str, ...]) -> None:
    done = run(sys.executable, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_are_found_where_they_stand(tmp_path: Path) -> None:
    """No list of modules of when mkernel was installed comes between: one may be added or moved."""
    code = "import mkernel.added, sys; print(mkernel.added.__file__)"
    site = tmp_path / "a folder on the path"
    shutil.copytree(
        ROOT / "mkernel", site / "mkernel", ignore=shutil.ignore_patterns("__pycache__")
    )
    (site / "mkernel" / "added.py").touch()
    done = run(sys.executable, "-c", code, cwd=site)
    assert done.stdout.strip() == str(site / "mkernel" / "added.py"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import mkernel"),
        ("-m", "mkernel", "--version"),
        ("-S", "-c", "import mkernel.world"),
    ],
    ids=["import", "mkernel", "without-dependencies"],
)
def test_a_tree_that_is_not_built_says_run_make(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "mkernel", tmp_path / "mkernel", ignore=ignored)
    (tmp_path / "Makefile").touch()
    done = run(sys.executable, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert f"is not built for {sys.executable}: run `make` in {tmp_path}" in done.stderr


def test_make_builds_again_what_a_build_reads() -> None:
    """Sources and headers, and what says how they are compiled and linked."""
    said = run("make", "--print-data-base", "--question", ".venv/.installed").stdout
    rule = re.search(r"^\.venv/\.installed:(.*)", said, re.MULTILINE)
    assert rule is not None, said
    tracked = run("git", "ls-files", "CMakeLists.txt", "backends", "tests/native").stdout.split()
    unread = (".py", ".pyi", ".json", ".txt")
    read = {x for x in tracked if x.endswith("CMakeLists.txt") or not x.endswith(unread)}
    assert "backends/nics/softverbs/exports.map" in read
    assert not read - set(rule[1].split())


@pytest.mark.slow
def test_unit_tests_pass_in_a_build_without_cuda() -> None:
    """Of those that the build could matter to, all but what ptxas says of the kernels' sources, which
    needs no module. The few tests that need a module that is not there are skipped, and say which; a
    file that is not given here may be missing, nothing else."""
    code = """
import sys, pytest
for name in ("accelerators.hopper._hopper", "cuda._cuda"):
    sys.modules["mkernel.backends." + name] = None
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
    folders = [ROOT / "tests" / "unit" / name for name in ("hopper", "streams", "plan")]
    files = sorted(str(each) for folder in folders for each in folder.glob("test_*.py"))
    files.remove(str(folders[0] / "test_kernels_compiled.py"))
    done = run(sys.executable, "-c", code, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = 0
    for count, why in re.findall(r"^SKIPPED \[(\d+)\] (.*)", done.stdout, re.MULTILINE):
        if re.search(r"import of mkernel\S+\.(_hopper|_cuda) halted|built without nvcc", why):
            skipped += int(count)
        else:
            assert "is a published file" in why, why
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert skipped < int(passed[1]) / 8


def test_a_build_without_nics_runs_on_one_node_and_says_what_more_needs(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns(
        "_nics*.so", "libmkernel_*.so", "*.?pp", "*.cu*", "__pycache__"
    )
    shutil.copytree(ROOT / "mkernel", tmp_path / "mkernel", ignore=ignored)
    job = ["-m", "mkernel", "run", "all_gather_gemm", "--accelerator", "ascend"]
    small = ["--m", "256", "--n", "128", "--k", "64", "--iterations", "1"]
    one, two = (run(sys.executable, *job, *small, "--nodes", n, cwd=tmp_path) for n in "12")
    assert "PASSED" in one.stdout, one.stdout + one.stderr
    assert two.returncode != 0
    told = run(sys.executable, "-m", "mkernel", "doctor", "--json", cwd=tmp_path).stdout
    for said in (two.stderr, told):
        assert "not built" in said
        assert "install libibverbs-dev (infiniband/verbs.h) and then mkernel again" in said


def test_the_build_leaves_nics_out_without_their_header(tmp_path: Path) -> None:
    """Here there is one: it is left out as if there were none."""
    options = ["-DMKERNEL_NICS=OFF", "-DMKERNEL_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    done = run("cmake", "-S", str(ROOT), "-B", str(tmp_path), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nics: left out without infiniband/verbs.h" in done.stdout
    told = run("cmake", "--build", str(tmp_path), "--target", "help").stdout
    targets = set(re.findall(r"^(?:\.\.\. )?([\w.]+)", told, re.MULTILINE))
    assert "_ascend" in targets
    assert "mkernel_softverbs" not in targets
    assert "_nics" not in targets


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / "build" / "native" / "build.ninja").is_file(),
    reason="build/native has nothing to reuse: run make",
)
def test_native_code_of_plug_ins_compiles_with_the_headers_of_a_wheel(tmp_path: Path) -> None:
    """What a wheel has of native code: modules and libraries, and the headers for plug-ins."""
    build = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    done = run(sys.executable, "-m", "pip", "wheel", *build, ".")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "site")
    kinds = {Path(name).suffix for name in names if not name.startswith("mkernel/include/")}
    assert kinds <= {".py", ".pyi", ".so", ".json", ".typed", ".txt", ""}, sorted(kinds)
    assert set(names) >= DATA
    assert not [name for name in names if name.endswith("CMakeLists.txt")]
    assert {name for name in names if name.startswith("mkernel/include/")} == HEADERS

    # Both an installed mkernel and the repository say where the headers are.
    for folder, expected in ((tmp_path / "site", tmp_path / "site/mkernel/include"), (ROOT, ROOT)):
        told = run(sys.executable, "-m", "mkernel", "--include-dir", cwd=folder)
        assert told.stdout.strip() == str(expected), told.stderr
        made = run(
            "g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
            f"-I{expected}", str(PLUGIN), cwd=tmp_path,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by their names alone; of two with one name it refuses the second."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
