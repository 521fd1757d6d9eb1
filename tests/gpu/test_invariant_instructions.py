"""Check what invariant results rely on: instructions add alike, wherever an element is in a tile.

The products are native (``tests/native/hopper/wgmma_bits.cu``). Another order of K must be seen.
"""

from __future__ import annotations

from typing import Any

import pytest
from device_buffers import needs_gpus
from native_programs import NativeProgram

PROGRAM = NativeProgram("wgmma_bits", backend="hopper")
RELIED = ("n256", "n192", "n128")
"""The instructions of all tilings but that of promoted sums."""
PLANTED = ("shuffled", "halves")
SHOWN_BY = ("plain", "mixed", "cancelling", "long")
"""Operands by which other orders show; subnormal sums are exact."""
pytestmark = [needs_gpus(1), PROGRAM.is_built]


@pytest.fixture(scope="module")
def bits() -> dict[str, Any]:
    return PROGRAM.told()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_an_element_has_the_same_bits_anywhere_in_a_tile(bits: dict[str, Any], dtype: str) -> None:
    for kind, found in bits[dtype].items():
        layouts = [RELIED, [f"{name} nmajor" for name in RELIED]]
        if dtype == "float8_e4m3fn":
            layouts = [RELIED, ["n128 promoted"]]
        for layout in layouts:
            assert len({each for name in layout for each in found[name]}) == 1, (kind, layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_another_order_of_k_is_seen(bits: dict[str, Any], dtype: str) -> None:
    for planted in PLANTED:
        shown = [
            kind for kind in SHOWN_BY if bits[dtype][kind][planted] != bits[dtype][kind]["n256"]
        ]
        assert len(shown) >= 2, f"{planted} shows by {shown} alone"
