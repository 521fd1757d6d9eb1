"""Which tensors an op takes, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mkernel.errors import ArgumentError, Unsupported
from mkernel.ops.plain import _usual, plain, seen_by_torch

PLAIN = torch.ones(4, 4)


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Functional(torch.Tensor):
    """A subclass with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class FunctionalParameter(torch.nn.Parameter):
    """The same, of a parameter, as some inference engines have it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatching(torch.Tensor):
    """A wrapper with a ``__torch_dispatch__`` of its own, and no memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Dispatching:
        made: Dispatching = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [one.held if isinstance(one, cls) else one for one in args]
        return func(*inner, **(kwargs or {}))


def wanting_gradients() -> torch.Tensor:
    return torch.ones(4, 4, requires_grad=True)


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    made: torch.Tensor = masked_tensor(PLAIN, PLAIN > 0)
    return made


def escaped(transform: Callable[..., Any]) -> torch.Tensor:
    """What a transform of torch.func gave to the function that it transformed."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    transform(keep)(torch.ones(2, 4, 4))
    return kept[0]


# how the tensor comes to be → what the refusal says
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "requires grad": (wanting_gradients, r"torch\.no_grad\(\), or pass b\.detach\(\)"),
    "computed with gradients": (lambda: wanting_gradients() * 2, "the op has no backward"),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(4, 4)), "Parameter that requires grad"),
    "own __torch_function__": (
        lambda: PLAIN.as_subclass(Functional),
        r"Functional.* a plain torch\.Tensor: pass the tensor inside of it",
    ),
    "parameter of a subclass": (
        lambda: FunctionalParameter(PLAIN, requires_grad=False),
        "FunctionalParameter",
    ),
    "own __torch_dispatch__": (lambda: Dispatching(PLAIN), "Dispatching"),
    "fake": (lambda: FakeTensorMode().from_tensor(PLAIN), "fake tensors have no data"),
    "masked": (masked, "MaskedTensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([PLAIN, PLAIN], layout=torch.jagged),
        "NestedTensor",
    ),
    "nested": (lambda: torch.nested.nested_tensor([PLAIN, PLAIN]), "nested"),
    "sparse": (PLAIN.to_sparse, "sparse_coo"),
    "sparse rows": (PLAIN.to_sparse_csr, "sparse_csr"),
    "opaque": (PLAIN.to_mkldnn, "_mkldnn"),
    "negated": (lambda: torch._neg_view(PLAIN), r"resolve_neg\(\)"),
    "zeros without memory": (lambda: torch._efficientzerotensor((4, 4)), "without memory"),
    "functional": (lambda: torch._to_functional_tensor(PLAIN), "without memory|transform"),
    "left over from vmap": (lambda: escaped(torch.func.vmap), "torch.func"),
    "left over from grad": (lambda: escaped(torch.func.grad), "the op has no backward"),
}


def look_at(value: object, *, before: object = PLAIN, after: object = None) -> tuple[Any, ...]:
    return plain("an_op", ("a", "b", "out"), (before, value, after))


@pytest.mark.filterwarnings("ignore")  # of torch: prototypes
@pytest.mark.parametrize("what", REFUSED)
def test_a_tensor_that_is_more_or_less_than_memory_is_refused(what: str) -> None:
    make, said = REFUSED[what]
    with pytest.raises(ArgumentError, match=said) as refused:
        look_at(make())
    assert refused.value.argument == "b"


def test_a_tensor_with_a_tangent_is_refused() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(PLAIN, PLAIN)
        with pytest.raises(ArgumentError, match=r"forward-mode.*b\.detach\(\)"):
            look_at(dual)
        assert look_at(dual.detach())[0] is PLAIN
        with torch.no_grad(), pytest.raises(ArgumentError, match="forward-mode"):
            look_at(dual)


PASSING: dict[str, Callable[[], object]] = {
    "plain": lambda: torch.ones(4, 4),
    "column-major": lambda: torch.ones(4, 8).t(),
    "none": lambda: None,
    "a flag": lambda: True,
    "no tensor": lambda: [[1.0]],  # the op's own checks refuse it
    "empty": lambda: torch.ones(0, 4),
    "on another device": lambda: torch.ones(4, 4, device="meta"),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(4, 4), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(4, 4)),
    "subclass that changes nothing": lambda: PLAIN.as_subclass(Plain),
}


@pytest.mark.parametrize("what", PASSING)
def test_plain_tensors_pass_as_they_are(what: str) -> None:
    value = PASSING[what]()
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode:
            passed = look_at(value)
            assert passed[0] is PLAIN
            assert passed[1] is value


def test_a_result_under_way_is_awaited() -> None:
    inner = torch.ones(4, 4)
    coming = AsyncCollectiveTensor(inner)
    assert look_at(coming)[1] is inner
    assert coming.completed
    with pytest.raises(ArgumentError, match="requires grad"):
        look_at(AsyncCollectiveTensor(wanting_gradients()))


class SeesAll(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeesCalls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesAll, SeesCalls, FakeTensorMode])
def test_a_mode_that_would_not_see_the_op_is_named(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    with mode(), pytest.raises(Unsupported, match=rf"an_op inside {mode.__name__}"):
        look_at(PLAIN)


def inside_vmap(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.func.vmap(body)(torch.ones(2, 4, 4))


def inside_grad(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.func.grad(lambda x: body(x).sum())(torch.ones(4, 4))


def inside_jvp(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.func.jvp(body, (torch.ones(4, 4),), (torch.ones(4, 4),))


def inside_trace(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.jit.trace(body, (torch.ones(4, 4),), check_trace=False)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_derivatives_of_torch_func_are_refused_by_name(transform: Any) -> None:
    """torch's own words were of autograd.Function and setup_context, which a user never wrote."""
    taken = transform(lambda x: x.sum() if seen_by_torch(x, None) else x)
    with pytest.raises(Unsupported, match=r"inside a transform of torch\.func .*call backward"):
        taken(torch.ones(4))
    assert seen_by_torch(torch.ones(4, requires_grad=True))


@pytest.mark.filterwarnings("ignore")  # of torch: deprecations
@pytest.mark.parametrize("inside", [inside_vmap, inside_grad, inside_jvp, inside_trace])
def test_a_transform_is_refused_whatever_the_arguments_are(
    inside: Callable[[Callable[[torch.Tensor], torch.Tensor]], None],
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        for value in (x, PLAIN):
            with pytest.raises(Unsupported, match="an_op inside"):
                look_at(value)
        return x * 1

    inside(body)


def test_usual_arguments_take_the_short_way() -> None:
    """Tensors and parameters without anything to record, and what stands for none."""
    tensor, parameter = torch.zeros(2), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert _usual((tensor, parameter, None, False, True)) is True
    for unusual in (tensor.as_subclass(Functional), torch._neg_view(tensor), wanting_gradients()):
        assert _usual((None, unusual)) is False
        assert _usual((tensor, True, unusual)) is False
    assert _usual((Dispatching(tensor),)) is False
