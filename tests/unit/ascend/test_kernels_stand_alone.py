"""Kernels and the tile ISA include nothing of the simulator, the host or the operating system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ASCEND = Path(__file__).parents[3] / "backends" / "accelerators" / "ascend"
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<][^">]+)[">]', re.MULTILINE)
ALLOWED = re.compile(
    r'"backends/accelerators/ascend/(isa|kernels)/|"backends/nics/put_command\.hpp|<\w+$'
)
OF_A_HOST = {"<atomic", "<chrono", "<mutex", "<source_location", "<thread", "<functional"}
HEADERS = sorted(
    [*(ASCEND / "isa").rglob("*.hpp"), *(ASCEND / "kernels").rglob("*.hpp")],
)


def strangers(text: str) -> list[str]:
    found = INCLUDE.findall(text)
    return [each[1:] for each in found if not ALLOWED.match(each) or each in OF_A_HOST]


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.relative_to(ASCEND)))
def test_a_header_of_kernels_includes_only_the_isa(header: Path) -> None:
    assert strangers(header.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        '#include "backends/accelerators/ascend/sim/core.hpp"',
        '#  include "backends/accelerators/ascend/host/kernels.hpp"',
        '#include "backends/nics/fifo_device.hpp"',
        '#include "backends/runtime/signal_pad.hpp"',
        "#include <atomic>",
        "#include <unistd.h>",
        "#include <sys/mman.h>",
    ],
)
def test_another_include_would_be_found(line: str) -> None:
    assert len(strangers(f"#include <cstdint>\n{line}\n")) == 1
