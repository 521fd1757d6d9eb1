"""Kernels and the tile ISA include nothing of the simulator, the host or the operating system; all of
them run on another core type, and every instruction stands beside the vendor's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ASCEND = ROOT / "backends" / "accelerators" / "ascend"
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<][^">]+)[">]', re.MULTILINE)
ALLOWED = re.compile(
    r'"backends/accelerators/ascend/(isa|kernels)/|"backends/transport/(channel|put_command)\.hpp|<\w+$'
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
        '#include "backends/transport/fifo_host.hpp"',
        '#include "backends/transport/signal_pad.hpp"',
        "#include <atomic>",
        "#include <unistd.h>",
        "#include <sys/mman.h>",
    ],
)
def test_another_include_would_be_found(line: str) -> None:
    assert len(strangers(f"#include <cstdint>\n{line}\n")) == 1


KERNELS = [header for header in HEADERS if "bool run()" in header.read_text()]


@pytest.mark.parametrize("header", KERNELS, ids=lambda path: str(path.relative_to(ASCEND)))
def test_every_kernel_is_started_by_the_launch_macro_on_another_core_too(header: Path) -> None:
    text = header.read_text()
    (arguments,) = re.findall(r"^MKERNEL_ASCEND_KERNEL\((.*?)\)$", text, re.MULTILINE)
    cores, op, name, *_ = arguments.split(", ")
    assert cores in ("aic", "aiv")
    assert (op, name) == (header.parent.name, header.stem)
    other = (ROOT / "tests" / "native" / "ascend" / "test_other_core.cpp").read_text()
    assert f'#include "{header.relative_to(ROOT)}"' in other


def test_every_instruction_is_in_the_table_of_the_vendors() -> None:
    text = (ASCEND / "sim" / "core.hpp").read_text()
    body = text[text.index("class Core {") : text.index("// --- host side ---")]
    signature = r"^    (?:\[\[nodiscard\]\] )?(?:void|bool|std::u?int\w+) (\w+)\("
    instructions = re.findall(signature, body, re.MULTILINE)
    assert len(instructions) > 30
    table = (ROOT / "docs" / "ascend-isa.md").read_text()
    assert [name for name in instructions if f"`{name}`" not in table] == []
