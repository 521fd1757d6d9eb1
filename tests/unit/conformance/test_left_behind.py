"""What a session leaves in /dev/shm is counted; what another process works with is not. Nor is a thread
that is about to end counted with what worlds leave."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mkernel.conformance.checks import lives
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


def test_only_threads_that_stay_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look finds one less, and what is held at rest is found after that."""
    before = lives.held_at_rest()
    told, looks = threading.Event(), iter((False, True))
    late = threading.Thread(target=told.wait, daemon=True)
    late.start()
    held = lives._held

    def ends_late() -> dict[str, int]:
        if next(looks, False):
            told.set()
            late.join()
        return held()

    monkeypatch.setattr(lives, "_held", ends_late)
    assert lives.piled_up(before, 1) == {}
    told.clear()
    monkeypatch.setattr(lives, "_held", held)
    monkeypatch.setattr(lives, "_ENDING_S", 0.3)
    stays = threading.Thread(target=told.wait, daemon=True)
    stays.start()
    try:
        assert lives.piled_up(before, 1) == {"threads": 1}
        assert lives.piled_up(before, 2) == {}
        assert lives.held_at_rest()["threads"] == before["threads"] + 1
    finally:
        told.set()
        stays.join()
