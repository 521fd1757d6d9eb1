"""AllReduce and GEMM+AllReduce that prefetch: the same bits as without, whatever is prefetched, by
every kernel that exchanges."""

from __future__ import annotations

from pathlib import Path

import kept_ranks
import norm_ranks
import prefetch_ranks
import pytest
from device_buffers import needs_gpus, pair, worlds
from families import NORMED, SCALED, SUMS
from hopper_ranks import Shape, rows
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

# In one exchange: of one block, of few, of as many as leave a place to all blocks that prefetch, or to
# enough of them, and of more; in two exchanges, with a norm and without; by flags.
ROWS = [
    rows(1, 8192, norm="residual"),
    rows(1, 8),
    rows(5, 24576, norm="alone"),
    rows(33, 4096),
    rows(68, 8192, norm="residual"),
    rows(116, 8192, norm="residual"),
    rows(117, 8192, norm="residual"),
    rows(300, 8192, "float16"),
    rows(3000, 512),
    rows(1024, 8192, norm="residual"),
    rows(1031, 4104),
    rows(1031, 4104, "float16", norm="alone"),
    rows(4096, 4096),
]
REDUCE = "gemm_all_reduce"
LIBRARY = [
    Shape(REDUCE, 1, 4096, 512, layout="column"),
    Shape(REDUCE, 16, 1032, 1024, bias=True),
    Shape(REDUCE, 1, 8192, 512, norm="residual"),
    Shape(REDUCE, 1178, 4072, 256),
    Shape(REDUCE, 1526, 5440, 256, norm="residual"),
]
FEW = [*SUMS, *(shape for shape in SCALED if shape.op == REDUCE), *NORMED]


@pytest.fixture(scope="module")
def constants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few rows are left to their kernel wherever it takes them, with norms in it."""
    return norm_ranks.everywhere(tmp_path_factory.mktemp("prefetch") / "constants.json")


@pytest.fixture(params=["rows", "library", "few rows"])
def shapes(
    request: pytest.FixtureRequest, constants_file: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Shape]:
    """Calls of one way."""
    if request.param == "few rows":
        monkeypatch.setenv("MKERNEL_CONSTANTS", str(constants_file))
    if request.param != "rows":
        monkeypatch.setenv("MKERNEL_PATH", "library" if request.param == "library" else "fused")
    return {"rows": ROWS, "library": LIBRARY, "few rows": FEW}[request.param]


@worlds
def test_results_have_the_same_bits(world: int, shapes: list[Shape]) -> None:
    right(world, prefetch_ranks.hinted, shapes)


@worlds
def test_other_weights_of_a_shape_are_known_calls(world: int, shapes: list[Shape]) -> None:
    right(world, prefetch_ranks.known, shapes)


@worlds
def test_in_graphs(world: int, shapes: list[Shape]) -> None:
    right(world, prefetch_ranks.in_graphs, shapes[:4], 4)


@pair
@pytest.mark.parametrize(
    ("victim", "wanted"), [("residual", "other bits"), ("prefetch", "it was written to")]
)
def test_what_is_written_is_seen(world: int, victim: str, wanted: str, shapes: list[Shape]) -> None:
    """A planted fault: a launch writes to what it adds to sums, or to what it prefetches."""
    shape = next(each for each in shapes if each.norm == "residual")
    found = kept_ranks.run(
        prefetch_ranks.faulty, shape, victim, ranks_per_node=world, accelerator="hopper"
    )
    for failures in found:
        assert any(wanted in each for each in failures)
