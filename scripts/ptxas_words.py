"""Compiles kernels, and keeps what ptxas says of each beside its object, for tests to read.

CMake puts this program ahead of nvcc. `OBJECT.ptxas` is JSON: the command, the SHA-256 of each file
that nvcc read, and what was said.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

OF_EVERY_KERNEL = re.compile(r"ptxas info *: (?!\(C).*| *\d+ bytes stack frame, .*|")
"""Lines that ptxas says of every kernel. Any other, as a remark (C7515), is for whoever builds."""
QUICK = "--Ofast-compile=max"
"""The option of kernels that are compiled without optimisation (MKERNEL_QUICK_KERNELS)."""


def words_of(built: Path, source: Path) -> str | None:
    """Return what was said when ``source`` became ``built``. None where that is not known, where a file
    that nvcc read then, ``source`` among them, is another one now, and where it was built without
    optimisation."""
    try:
        kept = json.loads(Path(f"{built}.ptxas").read_text())
    except FileNotFoundError:
        return None
    read, command = kept["read"], kept["command"]
    if str(source) not in read or "-O3" not in command or QUICK in command:
        return None
    try:
        same = all(_digest(Path(file)) == digest for file, digest in read.items())
    except FileNotFoundError:
        return None
    return str(kept["said"]) if same else None


def compile_kernels(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run nvcc. What ptxas says is kept where it succeeds and writes a rule of what it read."""
    words = Path(f"{_after('-o', command)}.ptxas")
    words.unlink(missing_ok=True)
    done = subprocess.run(
        [*command, "-Xptxas", "-v"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0 and "-MF" in command:
        rule = Path(_after("-MF", command)).read_text()
        read = {str(file): _digest(file) for file in _made_from(rule)}
        words.write_text(json.dumps({"command": command, "read": read, "said": done.stdout}))
    return done


def _after(option: str, command: list[str]) -> str:
    return command[command.index(option) + 1]


def _made_from(rule: str) -> list[Path]:
    """The files behind the target of a rule for make."""
    named = rule.partition(":")[2].replace("\\\n", " ")
    return [Path(each.replace("\\ ", " ")) for each in re.findall(r"(?:\\ |\S)+", named)]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main(command: list[str]) -> int:
    """Launch the compiler, return its status, and show what is not said of every kernel."""
    done = compile_kernels(command)
    for line in done.stdout.splitlines():
        remark = QUICK not in command and not OF_EVERY_KERNEL.fullmatch(line)
        if done.returncode or remark:
            print(line, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
