"""Checks the plug-in for vLLM (``examples/plugins/vllm_mkernel``) on ranks of CPUs:

    python tests/vllm_plugin.py                    # makes an environment and removes it
    python tests/vllm_plugin.py --environment DIR  # keeps it there for the next time

The environment, of which 0.4 GB are downloaded, has the Python of vLLM's wheel without its binaries,
which need CUDA, and the packages that this Python imports without those that these ask for. torch and
mkernel are those of the Python that runs this. ``tests/vllm_plugin_ranks.py`` says what is checked: by
two ranks, and by four in two groups, as two stages of a pipeline have them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VLLM = "vllm==0.33.0"
IMPORTED = ROOT / "tests" / "data" / "vllm_imports.txt"


def made(folder: Path) -> Path:
    """Make the environment, unless there is one. Return its Python."""
    python, done = folder / "bin" / "python", folder / "complete"
    if done.exists():
        return python
    venv.create(folder, with_pip=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.check_output([python, "-c", purelib], text=True).strip())
    pip = [python, "-m", "pip", "--quiet"]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*pip, "download", "--no-deps", "--dest", wheels, VLLM], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            kept = [each for each in archive.namelist() if each.endswith((".py", ".json"))]
            about = [each for each in archive.namelist() if ".dist-info/" in each]
            archive.extractall(own, [*kept, *about])
    subprocess.run([*pip, "install", "--no-deps", "-r", IMPORTED], check=True)
    # Packages of its own come first. Hooks of editable installs run too, as they do here.
    ours = sysconfig.get_path("purelib")
    (own / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    done.touch()
    return python


def check(folder: Path) -> int:
    """Install the plug-in into the environment and run its ranks. Return the first exit code that is
    not 0."""
    python = made(folder)
    plugin = ROOT / "examples" / "plugins" / "vllm_mkernel"
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["cp", "-r", plugin, scratch], check=True)  # pip builds where the source is
        source = Path(scratch) / plugin.name
        pip = [python, "-m", "pip", "--quiet", "install", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, source], check=True)
        for ranks in (2, 4):
            cache = Path(scratch) / str(ranks)  # a graph that is found in one is not rewritten
            settings = {
                "VLLM_PLUGINS": "mkernel",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "VLLM_DISABLE_COMPILE_CACHE": "1",  # its key has no dtype without a whole model
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
                "OMP_NUM_THREADS": "1",
            }
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            program = ROOT / "tests" / "vllm_plugin_ranks.py"
            process = subprocess.Popen(
                [python, *launch, program], env=os.environ | settings, cwd=scratch
            )
            try:
                code = process.wait(900)
            finally:
                process.terminate()  # which ends its ranks, too
                process.wait(60)
            if code:
                return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--environment", type=Path, help="a folder for it; default: a temporary one"
    )
    options = parser.parse_args()
    if options.environment:
        return check(options.environment.absolute())
    with tempfile.TemporaryDirectory() as folder:
        return check(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
