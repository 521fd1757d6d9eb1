"""Native test programs for GPUs, which print what they found as JSON."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "build/native/backends/accelerators"


@dataclass(frozen=True)
class NativeProgram:
    """One of them, of ``backend``'s, which is given ``timeout_s`` for a run."""

    name: str
    timeout_s: float = 180.0
    backend: str = "cuda"

    @property
    def path(self) -> Path:
        """Return its path."""
        return FOLDER / self.backend / "tests" / self.name

    @property
    def is_built(self) -> pytest.MarkDecorator:
        """A mark of its tests."""
        return pytest.mark.skipif(
            not self.path.is_file(),
            reason=f"{self.path} is not built; `make test` builds it, with nvcc",
        )

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Whatever it ends with."""
        return subprocess.run(
            [str(self.path), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=self.timeout_s,
            check=False,
        )

    def told(self, *arguments: object) -> dict[str, Any]:
        """What it prints, where it ends well."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found
