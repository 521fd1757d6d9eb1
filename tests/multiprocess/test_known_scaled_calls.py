"""Calls of e4m3 operands with a known signature start without Python, with the scales of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from in_world import DEADLINE_S
from once import once

import mkernel
from mkernel.backends.contracts.norm import add_and_normalise
from mkernel.backends.contracts.scaled import dequantised, quantised_rows
from mkernel.errors import MkernelError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "starting_backend:Starting"
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
M, N, K = 64, 256, 256
SCALES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "row": ((M, 1), (1, N)),
    "block": ((M, K // 128), (K // 128, N // 128)),
    "tensor": ((1, 1), (1, 1)),
    "number": ((), ()),
}
WRONG = 1e-2  # results are bfloat16


class Given(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor


def given(turn: int, mode: str = "row", rank: int | None = None) -> Given:
    """Operands and scales of one call: other ones in every turn."""
    rank = mkernel.world().rank if rank is None else rank
    chance = torch.Generator().manual_seed(100 * turn + rank)
    a, b = (torch.randn(rows, K, generator=chance).to(torch.float8_e4m3fn) for rows in (M, N))
    of_a, of_b = (torch.rand(sizes, generator=chance) + 0.5 for sizes in SCALES[mode])
    return Given(a, b.t(), of_a, of_b.t().contiguous().t() if of_b.dim() else of_b)


def product(one: Given, other: Given) -> torch.Tensor:
    wide = []
    for matrix, scale in ((one.a, one.a_scale), (other.b, other.b_scale)):
        flat = scale.view(1, 1) if scale.dim() == 0 else scale
        wide.append(dequantised(matrix, flat, torch.float64))
    return wide[0] @ wide[1]


def truth(op: str, turn: int, mode: str) -> torch.Tensor:
    world, rank = mkernel.world().size, mkernel.world().rank
    everyone = [given(turn, mode, each) for each in range(world)]
    if op == "all_gather_gemm":
        return torch.cat([product(each, everyone[rank]) for each in everyone])
    total = sum((product(each, each) for each in everyone), torch.zeros(M, N).double())
    return total.chunk(world)[rank] if op == "gemm_reduce_scatter" else total


def called(op: str, of: Given, **options: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(mkernel, op)(
        of.a, of.b, a_scale=of.a_scale, b_scale=of.b_scale, **options
    )
    return found


def backend() -> Any:
    return mkernel.world().accelerator


def in_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 1) -> list[Any]:
    return mkernel.launch(
        function, *arguments, ranks_per_node=ranks, accelerator=BACKEND, timeout_s=DEADLINE_S
    )


def repeated(op: str, mode: str, stale: bool) -> tuple[list[bool], list[float]]:
    """By turn: whether the call began without Python, and its relative error."""
    began, errors = [], []
    backend().stale = stale
    for turn in range(4):
        before = len(backend().started)
        out = called(op, given(turn, mode))
        mkernel.synchronize()
        right = truth(op, turn, mode)
        errors.append(float((out.double() - right).norm() / right.norm()))
        began.append(len(backend().started) > before)
    return began, errors


@pytest.mark.parametrize(
    ("op", "mode"),
    [
        *((op, mode) for op in OPS for mode in ("row", "block")),
        ("all_gather_gemm", "tensor"), ("gemm_all_reduce", "number"),
    ],
)  # fmt: skip
def test_every_call_has_its_own_scales(op: str, mode: str) -> None:
    for began, errors in in_ranks(repeated, op, mode, False, ranks=2):
        assert began == [False, True, True, True]
        assert max(errors) < WRONG


@pytest.mark.parametrize("mode", SCALES)
def test_scales_of_the_call_before_are_caught(mode: str) -> None:
    """The planted fault; the first call by a starter has none before it."""
    for began, errors in in_ranks(repeated, "gemm_all_reduce", mode, True, ranks=2):
        assert began == [False, True, True, True]
        assert max(errors[:2]) < WRONG < min(errors[2:])


def normalised(quantise: Any) -> list[tuple[bool, bool]]:
    """Return by turn whether the call began without Python, and whether its results have the bits of
    the norm of the plain product, and of its rows quantised."""
    found = []
    for turn in range(4):
        of, chance = given(turn), torch.Generator().manual_seed(turn)
        residual, weight = (
            torch.randn(*sizes, generator=chance).bfloat16() for sizes in ((M, N), (N,))
        )
        out, new = called("gemm_all_reduce", of), torch.empty(M, N).bfloat16()
        mkernel.synchronize()
        add_and_normalise(out, [residual], weight, 0.5, out, new)
        wanted = (out, new) if quantise is None else (*quantised_rows(out), new)
        before = len(backend().started)
        norm = {"residual": residual, "norm_weight": weight, "eps": 0.5, "quantise": quantise}
        results = called("gemm_all_reduce", of, **norm)
        mkernel.synchronize()
        bits = [[each.view(torch.uint8) for each in many] for many in (results, wanted)]
        right = all(map(torch.equal, *bits)) and len(results) == len(wanted)
        found.append((len(backend().started) > before, right))
    return found


@pytest.mark.parametrize("quantise", [None, "row"])
def test_normalised_products(quantise: Any) -> None:
    for found in in_ranks(normalised, quantise, ranks=2):
        assert found == [(turn > 0, True) for turn in range(4)]


def written_in_place() -> tuple[int, float]:
    op, of, new = "gemm_all_reduce", given(0), given(1)
    called(op, of)
    for old, fresh in zip(of, new, strict=True):
        old.copy_(fresh)
    out, right = called(op, of), truth(op, 1, "row")
    mkernel.synchronize()
    return len(backend().started), float((out.double() - right).norm() / right.norm())


def test_scales_that_were_written_to_between_calls() -> None:
    ((started, error),) = in_ranks(written_in_place)
    assert started == 1
    assert error < WRONG


# ---- what is another signature -------------------------------------------------------------------


def situations() -> dict[str, tuple[int, str]]:
    """By situation: calls that began without Python (of one), and what was raised. What is said of
    wrong ones is in tests/unit/ops/test_refused_alone.py."""
    op, of = "gemm_all_reduce", given(0)
    called(op, of)
    found: dict[str, tuple[int, str]] = {}

    def look(name: str, other: Given, **options: Any) -> None:
        before, raised = len(backend().started), ""
        try:
            called(op, other, **options)
            mkernel.synchronize()
        except MkernelError as error:
            raised = f"{type(error).__name__}: {error}"
        found[name] = (len(backend().started) - before, raised)

    def apart(scale: torch.Tensor, dim: int) -> torch.Tensor:
        """With a gap behind each element."""
        doubled = scale.repeat_interleave(2, dim)
        return doubled[::2] if dim == 0 else doubled[:, ::2]

    missing: Any = None
    look("the same", of)
    look("another mode", given(0, "block"))
    look("single ones", given(0, "number"))
    look("a_scale of other rows", of._replace(a_scale=of.a_scale[:-1]))
    look("b_scale of other columns", of._replace(b_scale=of.b_scale[:, :-1]))
    for name in ("a_scale", "b_scale"):
        scale = getattr(of, name)
        look(f"{name} in float64", of._replace(**{name: scale.double()}))
        look(f"{name} elsewhere", of._replace(**{name: scale.to("meta")}))
        look(f"{name} with gaps", of._replace(**{name: apart(scale, int(name == "b_scale"))}))
        look(f"no {name}", of._replace(**{name: missing}))
        look(f"{name} requires grad", of._replace(**{name: scale.clone().requires_grad_()}))
    look("another out_dtype", of, out_dtype=torch.float16)
    look("that out_dtype again", of, out_dtype=torch.float16)
    look("the same again", of)
    with torch.no_grad():
        look("no_grad", of._replace(a_scale=of.a_scale.clone().requires_grad_()))
    out = torch.empty(M, N, dtype=torch.bfloat16)
    look("out", of, out=out)
    look("out again", of, out=out)
    look("a bias", of, bias=torch.zeros(N, dtype=torch.bfloat16))
    look("a bias again", of, bias=torch.ones(N, dtype=torch.bfloat16))
    plain = torch.ops.mkernel.gemm_all_reduce_scaled
    plain(*of, group=mkernel.world().name)
    before = len(backend().started)
    plain(*of, group=mkernel.world().name)
    found["the registered op"] = (len(backend().started) - before, "")
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, tuple[int, str]]:
    return once(request, lambda: dict(in_ranks(situations)[0]))


def test_what_differs_goes_through_python(found: dict[str, tuple[int, str]]) -> None:
    assert {name for name, (calls, _) in found.items() if calls} == {
        "the same", "the same again", "that out_dtype again", "no_grad", "out again", "a bias again",
        "the registered op",
    }  # fmt: skip


def test_what_is_legal_is_computed(found: dict[str, tuple[int, str]]) -> None:
    refused = {name for name, (_, raised) in found.items() if raised}
    assert not refused & {
        "the same", "another mode", "single ones", "a_scale with gaps", "b_scale with gaps",
        "another out_dtype", "out", "a bias",
    }  # fmt: skip
