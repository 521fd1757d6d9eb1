"""Shapes from the command line, from files and from the lists that ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mkernel.errors import ArgumentError, InputFileError
from mkernel.harness.shapes import SHIPPED, shapes
from mkernel.plan.model import OpName

OPS: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")


def test_sizes_on_the_command_line() -> None:
    found = shapes("4096 x 1024 x 512,64x32x16", OPS[:2], 4)
    assert [(each.op, each.m, each.n, each.k) for each in found] == [
        ("all_gather_gemm", 4096, 1024, 512),
        ("all_gather_gemm", 64, 32, 16),
        ("gemm_reduce_scatter", 4096, 1024, 512),
        ("gemm_reduce_scatter", 64, 32, 16),
    ]


def test_targets() -> None:
    found = shapes("targets", OPS, 4)
    assert len(found) == 12
    assert all(each.aimed_at(4, "hopper") for each in found)
    assert not any(each.aimed_at(2, "hopper") for each in found)
    assert not any(each.aimed_at(4, "streams") for each in found)
    assert {each.size for each in found if each.op == "gemm_all_reduce"} == {
        "4096 x 4096 x 1024",
        "8192 x 8192 x 2048",
        "16384 x 16384 x 4096",
        "8192 x 8192 x 7168",
    }


def test_targets_of_experts_and_attention() -> None:
    experts = shapes("moe-targets", ("moe_dispatch_gemm", "moe_gemm_combine"), 2)
    attention = shapes("ring-targets", ("ring_attention",), 2)
    layers = shapes("moe-targets", ("moe_layer",), 2)
    assert (len(experts), len(layers), len(attention)) == (24, 6, 20)
    assert {each.target_us for each in layers} == {None}
    assert layers[0].flops(2) == 2.0 * 3 * 32 * 8 * 7168 * 2048
    for each in (*experts, *attention):
        assert each.aimed_at(2, "hopper")
        assert not each.aimed_at(4, "hopper")
    assert {each.target_us for each in attention} == {each.target for each in experts} == {None}
    assert {each.target for each in attention} == {1.08, 1.05, 1.03}
    assert min(each.target_us or 0 for each in experts) == 225
    gradients = shapes("ring-targets", ("ring_attention_backward",), 2)
    assert {(each.sizes["sequence"], each.target) for each in gradients} == {
        (8192, None), (16384, 1.08), (24576, 1.08),
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="for 4 ranks"):
        shapes("moe-targets", ("moe_dispatch_gemm",), 4)


def test_targets_of_e4m3_operands() -> None:
    found = shapes("fp8-targets", ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"), 2)
    times = [each.target_us for each in found]
    assert times == [22, 85, 222, 745, 755, 25, 95, 240, 775, 850, *[None] * 5]


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers(ranks: int) -> None:
    found = shapes("layers", OPS, ranks)
    assert len(found) >= 30
    assert {each.m for each in found} == {64 << i for i in range(10)}
    assert {each.name.split()[0] for each in found} == {
        "llama-3-8b", "llama-3-70b", "qwen3-32b", "deepseek-v3",
    }  # fmt: skip
    for each in found:
        assert each.m % ranks == each.n % 8 == each.k % 8 == 0
    assert len({each.model_dump_json() for each in found}) == len(found)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    rows = [
        {"op": OPS[0], "m": 8, "n": 8, "k": 8},
        {"op": OPS[0], "m": 4, "n": 8, "k": 8, "ranks": 2},
    ]
    path.write_text(json.dumps({"shapes": rows}))
    assert [each.m for each in shapes(str(path), OPS, 2)] == [8, 4]
    assert [each.m for each in shapes(str(path), OPS, 4)] == [8]
    with pytest.raises(ArgumentError, match="rows of gemm_all_reduce for 2 ranks"):
        shapes(str(path), OPS[2:], 2)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"shapes": [{"op": "all_gather_gemm", "m": 0, "n": 1, "k": 1}]}']
)
def test_bad_files_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(InputFileError, match=r"bad\.json"):
        shapes(str(path), OPS, 2)


def test_only_sums_have_rows_that_ranks_cannot_share_alike() -> None:
    (found,) = shapes("3x32x16", OPS[2:], 2)
    assert found.m == 3
    for op in OPS[:2]:
        with pytest.raises(ArgumentError, match="a multiple of 2"):
            shapes("3x32x16", (op,), 2)


def test_sums_of_serving_are_named_by_their_bytes() -> None:
    """The list of `bench/measure.sh all_reduce`: 1 KiB to 16 MiB of 16-bit elements, and few rows."""
    path = Path(__file__).parents[3] / "bench/sums_two_ranks.json"
    plain, products = (shapes(str(path), (op,), 2) for op in ("all_reduce", "gemm_all_reduce"))
    units = {"KiB": 1 << 10, "MiB": 1 << 20}
    sizes = {"": 0} | {
        each.name: int(each.name.split()[0]) * units[each.name.split()[1]] for each in plain
    }
    assert {sizes[each.name] for each in plain} == {1 << i for i in range(10, 25)}
    assert all(2 * each.sizes["m"] * each.sizes["n"] == sizes[each.name] for each in plain)
    assert {each.sizes["n"] for each in plain[3:]} == {4096, 8192}
    assert {each.m for each in products} == {1, 8, 32, 64, 128, 256, 512}
    assert len({(each.n, each.k) for each in products}) == 5


def test_unknown_lists_are_refused() -> None:
    with pytest.raises(ArgumentError, match=", ".join(SHIPPED)):
        shapes("nowhere", OPS, 2)
