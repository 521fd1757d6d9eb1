"""Wrong calls: refused with the argument's name, its value and the legal range; nothing started."""

from __future__ import annotations

import pytest
import torch
from in_world import DEADLINE_S

import mkernel
from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


# what is wrong → (what is changed of a right call, error, argument it names, part of the message)
WRONG: dict[str, tuple[dict[str, object], type[ArgumentError], str, str]] = {
    "a of rank 1": ({"a": half(64)}, ShapeError, "a", "1-D"),
    "a that is no tensor": ({"a": [[1.0]]}, DtypeError, "a", "list"),
    "a that is empty": ({"a": half(0, 64)}, ShapeError, "a", "empty"),
    "a of another shape": ({"a": half(64, 56)}, ShapeError, "b", "a has 56, b has 64"),
    "a of another dtype": ({"a": half(64, 64).float()}, DtypeError, "b.dtype", "float16"),
    "a of integers": ({"a": half(64, 64).int()}, DtypeError, "a.dtype", "bfloat16"),
    "a on another device": ({"a": half(64, 64).to("meta")}, ArgumentError, "a.device", "cpu"),
    "b of rank 3": ({"b": half(1, 64, 64)}, ShapeError, "b", "3-D"),
    "b that is empty": ({"b": half(64, 0)}, ShapeError, "b", "empty"),
    "b of another shape": ({"b": half(72, 64)}, ShapeError, "b", "a has 64, b has 72"),
    "b of another dtype": ({"b": half(64, 64).float()}, DtypeError, "b.dtype", "float16"),
    "out of another shape": ({"out": half(64, 64)}, ShapeError, "out", "(128, 64)"),
    "out of another dtype": ({"out": half(128, 64).float()}, DtypeError, "out", "float16"),
    "out with gaps": ({"out": half(128, 128)[:, ::2]}, LayoutError, "out", "contiguous"),
    "out transposed": ({"out": half(64, 128).t()}, LayoutError, "out", "contiguous"),
    "out on another device": ({"out": half(128, 64).to("meta")}, ArgumentError, "out.device", "cpu"),
    "gathered transposed": ({"gathered": half(64, 128).t()}, LayoutError, "gathered", "contiguous"),
    "gathered of another dtype": (
        {"gathered": half(128, 64).float()}, DtypeError, "gathered", "float16"
    ),
    "out_dtype of another out": ({"out_dtype": torch.float32}, DtypeError, "out", "float32"),
    "out_dtype int32": ({"out_dtype": torch.int32}, DtypeError, "out_dtype", "float32"),
    "chunk": ({"chunk": 0}, ArgumentError, "chunk", "1"),
}  # fmt: skip
BY_ASCEND: dict[str, tuple[dict[str, object], type[ArgumentError], str, str]] = {
    "K unaligned": ({"a": half(64, 60), "b": half(60, 64)}, ShapeError, "k", "56 or 64"),
    "N unaligned": ({"b": half(64, 60)}, ShapeError, "n", "56 or 64"),
    "doubles": (
        {"a": half(64, 64).double(), "b": half(64, 64).double()},
        DtypeError,
        "a.dtype",
        "bfloat16",
    ),
}


def refusals(simulated: bool) -> list[str]:
    """What is wrong with how each wrong call is refused, every time it is made after a right one."""
    found = []
    for name, (changes, kind, argument, part) in (WRONG | (BY_ASCEND if simulated else {})).items():
        for _ in range(2):
            right: dict[str, object] = {
                "a": half(64, 64), "b": half(64, 64), "out": half(128, 64),
                "gathered": half(128, 64), "out_dtype": torch.float16, "chunk": 1,
            }  # fmt: skip
            if not bool((mkernel.all_gather_gemm(**right) == 64).all()):  # type: ignore[call-overload]
                found.append(f"{name}: the right call before it is wrong")
            try:
                mkernel.all_gather_gemm(**{**right, **changes})  # type: ignore[call-overload]
                found.append(f"{name}: nothing raised")
            except ArgumentError as error:
                if (type(error), error.argument) != (kind, argument) or part not in str(error):
                    found.append(f"{name}: {error!r}")
    return found


@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
def test_wrong_calls_are_refused_by_name_each_time(accelerator: str) -> None:
    simulated = accelerator == "ascend"
    found = mkernel.launch(refusals, simulated, ranks_per_node=2, accelerator=accelerator)
    assert found == [[], []]


EXPERTS = 6
REFUSED = "topk_ids = ... {} ... is not legal; expected expert numbers 0 to 5, or -1 for none"
# (the lowest, the highest expert that a token asks for) → what the call comes to
ASKED = {
    (0, EXPERTS - 1): "right",
    (0, EXPERTS): REFUSED.format(EXPERTS),
    (-1, EXPERTS - 1): "right",
    (-2, EXPERTS - 1): REFUSED.format(-2),
    (-2, EXPERTS): REFUSED.format(-2),
}


def ask_for_experts(dtype: torch.dtype) -> dict[tuple[int, int], str]:
    """What calls come to that ask for experts at the bounds and just beyond."""
    world = mkernel.world()
    each = EXPERTS // world.size
    x, w = half(4, 64), half(each, 64, 64)
    found = {}
    for low, high in ASKED:
        ids = torch.full((4, 2), 2, dtype=dtype)
        ids[1, 1], ids[3, 0] = low, high
        try:
            sent = mkernel.moe_dispatch_gemm(x, ids, w, out_dtype=torch.float32)
        except ArgumentError as error:
            found[low, high] = str(error)
        else:
            rows = world.size * ids[ids >= 0].bincount(minlength=EXPERTS)
            mine = rows[world.rank * each :][:each]
            right = torch.equal(sent.counts, mine) and bool((sent.outputs == 64).all())
            found[low, high] = "right" if right else "wrong"
    return found


@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_from_the_first_to_the_last_and_no_other(
    dtype: torch.dtype, accelerator: str
) -> None:
    for found in mkernel.launch(ask_for_experts, dtype, ranks_per_node=2, accelerator=accelerator):
        assert found == ASKED


def one_rank_wrong() -> str:
    """A rank that refuses its own call leaves; the others learn why."""
    rows = half(64, 64) if mkernel.world().rank else half(64)
    mkernel.all_gather_gemm(rows, half(64, 64))
    return "unreachable"


@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
def test_a_wrong_call_on_one_rank_is_the_error_that_launch_raises(accelerator: str) -> None:
    with pytest.raises(ShapeError, match="1-D"):
        mkernel.launch(
            one_rank_wrong, ranks_per_node=2, timeout_s=DEADLINE_S, accelerator=accelerator
        )
