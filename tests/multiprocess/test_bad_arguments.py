"""Wrong calls: refused with the argument's name, its value and the legal range; nothing started."""

from __future__ import annotations

import pytest
import torch

import mkernel
from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


# name → (arguments, keywords, error, argument it names, what the message must contain)
WRONG: dict[str, tuple[tuple[object, ...], dict[str, object], type[ArgumentError], str, str]] = {
    "a of rank 1": ((half(64), half(64, 64)), {}, ShapeError, "a", "1-D"),
    "b of rank 3": ((half(64, 64), half(1, 64, 64)), {}, ShapeError, "b", "3-D"),
    "no tensor": (([[1.0]], half(64, 64)), {}, DtypeError, "a", "list"),
    "K mismatch": ((half(64, 64), half(72, 64)), {}, ShapeError, "b", "a has 64, b has 72"),
    "dtype mix": ((half(64, 64), half(64, 64).float()), {}, DtypeError, "b.dtype", "float16"),
    "dtype": ((half(64, 64).double(), half(64, 64)), {}, DtypeError, "a.dtype", "bfloat16"),
    "out_dtype": ((half(64, 64), half(64, 64)), {"out_dtype": torch.int32}, DtypeError,
                  "out_dtype", "float32"),
    "a transposed": ((half(64, 128).t(), half(64, 64)), {}, LayoutError, "a", "contiguous"),
    "b with gaps": ((half(64, 64), half(64, 128)[:, ::2]), {}, LayoutError, "b", "contiguous"),
    "empty a": ((half(0, 64), half(64, 64)), {}, ShapeError, "a", "empty"),
    "empty b": ((half(64, 64), half(64, 0)), {}, ShapeError, "b", "empty"),
    "K unaligned": ((half(64, 60), half(60, 64)), {}, ShapeError, "k", "56 or 64"),
    "N unaligned": ((half(64, 64), half(64, 60)), {}, ShapeError, "n", "56 or 64"),
    "out of another shape": ((half(64, 64), half(64, 64)), {"out": half(64, 64)}, ShapeError,
                             "out", "(128, 64)"),
    "out of another dtype": ((half(64, 64), half(64, 64)),
                             {"out": half(128, 64), "out_dtype": torch.float32}, DtypeError,
                             "out", "float32"),
    "out with gaps": ((half(64, 64), half(64, 64)), {"out": half(128, 128)[:, ::2]}, LayoutError,
                      "out", "contiguous"),
    "chunk": ((half(64, 64), half(64, 64)), {"chunk": 0}, ArgumentError, "chunk", "1"),
    "device": ((half(64, 64).to("meta"), half(64, 64)), {}, ArgumentError, "a.device", "cpu"),
}  # fmt: skip


def try_all() -> dict[str, tuple[str, str, str]]:
    """What each wrong call came to; between them, a right one must still work."""
    found = {}
    for name, (arguments, keywords, *_) in WRONG.items():
        try:
            mkernel.all_gather_gemm(*arguments, **keywords)  # type: ignore[call-overload]
            found[name] = ("nothing raised", "", "")
        except ArgumentError as error:
            found[name] = (type(error).__name__, error.argument, str(error))
        right = mkernel.all_gather_gemm(half(64, 64), half(64, 64), out_dtype=torch.float32)
        assert bool((right == 64).all()), name
    return found


def test_wrong_calls_are_refused_by_name() -> None:
    for found in mkernel.launch(try_all, ranks_per_node=2, accelerator="ascend"):
        for name, (_, _, error, argument, part) in WRONG.items():
            kind, named, message = found[name]
            assert (kind, named) == (error.__name__, argument), (name, message)
            assert part in message, name


# One argument of a right call, changed in one thing that the checks look at → the argument named.
CHANGED: dict[str, tuple[str, object, str]] = {
    "a, strides": ("a", half(64, 64).t(), "a"),
    "a, dtype": ("a", half(64, 64).float(), "b.dtype"),
    "a, shape": ("a", half(64, 56), "b"),
    "a, device": ("a", half(64, 64).to("meta"), "a.device"),
    "b, strides": ("b", half(64, 128)[:, ::2], "b"),
    "b, dtype": ("b", half(64, 64).float(), "b.dtype"),
    "out, strides": ("out", half(64, 128).t(), "out"),
    "out, dtype": ("out", half(128, 64).float(), "out"),
    "out, shape": ("out", half(128, 56), "out"),
    "out, device": ("out", half(128, 64).to("meta"), "out.device"),
    "gathered, strides": ("gathered", half(64, 128).t(), "gathered"),
    "gathered, dtype": ("gathered", half(128, 64).float(), "gathered"),
    "out_dtype": ("out_dtype", torch.float32, "out"),
    "chunk": ("chunk", 0, "chunk"),
}


def try_changed() -> dict[str, list[str]]:
    """The argument that each wrong call names, every time it is made after a right one."""
    right: dict[str, object] = {
        "a": half(64, 64), "b": half(64, 64), "out": half(128, 64), "gathered": half(128, 64),
        "out_dtype": torch.float16, "chunk": 1,
    }  # fmt: skip
    found: dict[str, list[str]] = {name: [] for name in CHANGED}
    for name, (argument, value, _) in CHANGED.items():
        for _ in range(2):
            mkernel.all_gather_gemm(**right)  # type: ignore[call-overload]
            try:
                mkernel.all_gather_gemm(**{**right, argument: value})  # type: ignore[call-overload]
                found[name].append("nothing raised")
            except ArgumentError as error:
                found[name].append(error.argument)
    return found


@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
def test_a_call_like_a_right_one_is_refused_each_time(accelerator: str) -> None:
    named = {name: [argument] * 2 for name, (_, _, argument) in CHANGED.items()}
    for found in mkernel.launch(try_changed, ranks_per_node=2, accelerator=accelerator):
        assert found == named


EXPERTS = 6
REFUSED = "topk_ids = ... {} ... is not legal; expected expert numbers 0 to 5"
# (the lowest, the highest expert that a token asks for) → what the call comes to
ASKED = {
    (0, EXPERTS - 1): "right",
    (0, EXPERTS): REFUSED.format(EXPERTS),
    (-1, EXPERTS - 1): REFUSED.format(-1),
    (-1, EXPERTS): REFUSED.format(-1),
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
            rows = world.size * ids.flatten().bincount(minlength=EXPERTS)
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


def test_a_wrong_call_on_one_rank_is_the_error_that_launch_raises() -> None:
    with pytest.raises(ShapeError, match="1-D"):
        mkernel.launch(one_rank_wrong, ranks_per_node=2, timeout_s=60, accelerator="ascend")
