"""The repository's root is a place to work in: what stands there is what is imported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.unbuilt import DISTRIBUTION

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import mkernel.backends.transport._transport, mkernel.topology"),
        ("-m", "mkernel", "--version"),
    ],
    ids=["import", "mkernel"],
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


def test_the_site_is_made_of_a_tree_that_is_built() -> None:
    """Its pages import the package. In a fresh clone the target builds it before."""
    told = run("make", "--dry-run", "VENV=of-a-fresh-clone", "site")
    assert told.returncode == 0, told.stderr
    assert -1 < told.stdout.find("--editable .") < told.stdout.find("mkdocs build"), told.stdout


@pytest.mark.long
def test_unit_tests_pass_in_a_build_without_cuda() -> None:
    """Run those tests that the build could matter to, all but what ptxas says of the kernels' sources,
    which needs no module. The few tests that need a module that is not there are skipped, and say
    which; a file that is not given here may be missing, nothing else. The short form is
    ``test_hopper_not_built.py``: all modules are imported and all ops planned in such a build."""
    code = """
import sys, pytest
for name in ("accelerators.cuda._kernels", "accelerators.cuda._cuda"):
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
        if re.search(r"import of mkernel\S+\.(_kernels|_cuda) halted|built without nvcc", why):
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


def test_what_depends_on_mkernel_names_this_project() -> None:
    """The distribution called `mkernel` that a package index has is another project."""
    (name,) = re.findall(r'^name = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert name == DISTRIBUTION
    templates = run("git", "ls-files", "*/pyproject.toml").stdout.split()
    assert len(templates) >= 2
    for template in templates:
        (needed,) = re.findall(r"^dependencies = \[(.*)\]", (ROOT / template).read_text(), re.M)
        assert f'"{name}"' in needed.split(", "), template
        assert '"mkernel"' not in needed.split(", "), template


FROM_AN_INDEX = re.compile(
    r"pip3? install\b[^\n`]*[ '\"]mkernel([-_]fused)?(?=[\[\s'\"`;,)=<>~]|\.\W|$)"
    r"|install[ ]mkernel(?![-\w])",
    re.MULTILINE,
)


def test_no_advice_takes_mkernel_from_an_index() -> None:
    """Ours is not there. What a file tells to install comes from its repository, or is another's."""
    for wrong in ("mkernel", "'mkernel-fused[bench]'", "-U mkernel-fused==0.2"):
        assert FROM_AN_INDEX.search(f"needs it: pip install {wrong}")
    assert FROM_AN_INDEX.search("re{} mkernel".format("install"))
    for right in (
        ".",
        "matplotlib",
        "./mkernel",
        "mkernel-tiny-nic",
        "dist/mkernel_fused-0.2.0.whl",
    ):
        assert not FROM_AN_INDEX.search(f"pip install {right}")
    for file in run(
        "git", "ls-files", "*.py", "*.md", "*.sh", "*.toml", "*.yml", "Makefile"
    ).stdout.split():
        if (ROOT / file).is_file():
            found = FROM_AN_INDEX.search((ROOT / file).read_text())
            assert found is None, f"{file}: {found and found[0]}"
