"""What a session leaves in /dev/shm is counted; what another process works with is not."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.conformance.nic_life_checks import shared_files

_MAPS_IT = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mine", [False, True])
def test_only_what_another_process_alone_has_mapped_is_left_out(tmp_path: Path, mine: bool) -> None:
    file = Path("/dev/shm", f"{tmp_path.parent.name}-{tmp_path.name}")
    file.write_bytes(b"left")
    try:
        assert file.name in shared_files()
        with subprocess.Popen(
            [sys.executable, "-S", "-c", _MAPS_IT, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdout
            assert other.stdout.readline() == b"mapped\n"
            if mine:
                with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
                    assert file.name in shared_files()
            else:
                assert file.name not in shared_files()
            other.communicate()
        assert file.name in shared_files()
    finally:
        file.unlink()
