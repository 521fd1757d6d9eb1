"""Tensors that are more or less than memory: refused by name on every op, or first made plain.

Kernels see addresses. Without the refusals gradients vanish, fake tensors are computed on null
pointers, and a DTensor ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import kept_ranks
import pytest
import torch
from torch import distributed

import mkernel
from mkernel.errors import ArgumentError, MkernelError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

OPS = (
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "moe_dispatch_gemm",
    "moe_combine",
    "moe_gemm_combine",
    "ring_attention",
)
SEEN_BY_TORCH = ("moe_dispatch_gemm", "moe_combine", "moe_gemm_combine", "ring_attention")
"""Calls that go through torch's dispatcher where torch has to see them (``tests/torch``)."""


def provided() -> list[str]:
    """The ops that this world's accelerator has."""
    return [op for op in OPS if op in mkernel.capabilities().ops]


RANKS = 2
Arguments = dict[str, Any]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


def right(op: str) -> Arguments:
    """Arguments of a right call on two ranks."""
    if op == "moe_dispatch_gemm":
        ids = torch.arange(16).view(8, 2) % 4
        return {"x": ones(8, 64), "topk_ids": ids, "w": ones(2, 64, 64)}
    if op == "moe_combine":
        sent = mkernel.moe_dispatch_gemm(**right("moe_dispatch_gemm"))
        return {"y": sent.outputs, "handle": sent.handle, "topk_weights": torch.ones(8, 2)}
    if op == "moe_gemm_combine":
        sent = mkernel.moe_dispatch_gemm(**right("moe_dispatch_gemm"))
        weights = torch.ones(8, 2)
        return {"h": ones(*sent.outputs.shape), "w2": ones(2, 64, 64), "handle": sent.handle,
                "topk_weights": weights}  # fmt: skip
    if op == "ring_attention":
        return {name: ones(1, 2, 16, 64) for name in "qkv"}
    rows = {"all_gather_gemm": 128, "gemm_reduce_scatter": 32, "gemm_all_reduce": 64}[op]
    made: Arguments = {"a": ones(64, 64), "b": ones(64, 64), "out": ones(rows, 64)}
    return made | ({"gathered": ones(128, 64)} if op == "all_gather_gemm" else {})


def result(op: str, arguments: Arguments) -> torch.Tensor:
    """What the op gives: all ones go in, and 64 or a multiple comes out."""
    given = getattr(mkernel, op)(**arguments)
    made: torch.Tensor = given.outputs if op == "moe_dispatch_gemm" else given
    return made.detach().clone()


# ---- what is refused -----------------------------------------------------------------------------


class Overriding(torch.Tensor):
    """A subclass with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def overriding(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Overriding)


def sharded(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    made: torch.Tensor = DTensor.from_local(
        tensor, init_device_mesh("cpu", (RANKS,)), [Replicate()], run_check=False
    )
    return made


def fake(tensor: torch.Tensor) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "requires grad": (with_gradient, "torch.no_grad()"),
    "subclass": (overriding, "Overriding"),
    "DTensor": (sharded, ".to_local()"),
    "fake": (fake, "outside of FakeTensorMode"),
    "meta": (meta, "the accelerator reads this memory only"),
}


def variants(
    arguments: Arguments, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, Arguments]]:
    """The call with one tensor changed, each in turn: (what an error must name, its arguments)."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            if change is not with_gradient or value.is_floating_point():
                yield name, {**arguments, name: change(value)}
        elif change is not with_gradient:  # a handle: integers
            for part, tensor in value._asdict().items():
                changed = value._replace(**{part: change(tensor)})
                yield f"{name}.{part}", {**arguments, name: changed}


@contextmanager
def gloo(folder: str) -> Iterator[None]:
    """A default process group of the world's ranks: the backend's, or one for this test."""
    world, ours = mkernel.world(), not distributed.is_initialized()
    if ours:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=world.rank, world_size=world.size
        )
    yield
    if ours:
        distributed.destroy_process_group()


def refusals(kind: str, folder: str) -> list[str]:
    """What is wrong with how calls with one unusable tensor are refused, each time after a right
    one with tensors that look the same."""
    found, accelerator = [], mkernel.world().accelerator
    change, said = KINDS[kind]
    named = "{}.device = " if change is meta else "{} = "
    with gloo(folder):
        for op in provided():
            call, arguments = getattr(mkernel, op), right(op)
            truth = result(op, arguments)
            if change is with_gradient and op in SEEN_BY_TORCH:
                continue
            for name, wrong in variants(arguments, change):
                for _ in range(2):
                    with mock.patch.object(
                        accelerator, "launch", wraps=accelerator.launch
                    ) as launch:
                        found += refused(
                            partial(call, **wrong), ArgumentError, named.format(name), said
                        )
                    if launch.called:
                        found.append(f"{op}, {name}: a kernel was started")
                    if not torch.equal(result(op, arguments), truth):
                        found.append(f"{op}, {name}: the right call that followed is wrong")
    return found


def refused(
    call: Callable[[], object], expected: type[MkernelError], start: str, said: str
) -> list[str]:
    """What is wrong with how a call is refused."""
    try:
        call()
    except expected as error:
        right = str(error).startswith(start) and said in str(error)
        return [] if right else [str(error)]
    return [f"nothing raised, not {start}..."]


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_that_is_not_plain_is_refused_each_time(kind: str, tmp_path: Path) -> None:
    """Checks do not depend on the accelerator; the kit's check ``wrong-calls`` has each in turn."""
    found = mkernel.launch(
        refusals, kind, str(tmp_path), ranks_per_node=RANKS, accelerator="streams"
    )
    assert found == [[]] * RANKS


def in_modes() -> list[str]:
    """Calls inside modes, with arguments made outside: a mode that counts sees the registered op, and
    one that stands in for data refuses what is real, in torch's own words."""
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for op in provided():
        if op in SEEN_BY_TORCH:
            continue
        arguments, truth = right(op), result(op, right(op))
        with FlopCounterMode(display=False) as counter:
            counted = result(op, arguments)
        if not torch.equal(counted, truth) or not torch.equal(arguments["out"], truth):
            found.append(f"{op} is wrong while it is counted")
        if counter.get_total_flops() == 0:
            found.append(f"{op} is not counted")
        try:
            with FakeTensorMode():
                result(op, arguments)
            found.append(f"{op}: data that are real were taken for fake ones")
        except AssertionError as error:
            if "FakeTensors" not in str(error):
                found.append(str(error))
    return found


# ---- what passes ---------------------------------------------------------------------------------


def as_parameters() -> list[str]:
    """Every floating tensor a Parameter that requires grad, where nothing records gradients."""
    found = []
    for op in provided():
        arguments = right(op)
        truth = result(op, arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                given = {**arguments, name: torch.nn.Parameter(value)}
                for mode in (torch.no_grad(), torch.inference_mode()):
                    with mode:
                        if not torch.equal(result(op, given), truth):
                            found.append(f"{op}, {name}: wrong")
    return found


def with_results_under_way(folder: str) -> list[str]:
    """Every tensor the result of a functional collective that nobody has waited for."""
    from torch.distributed import _functional_collectives as functional

    found = []
    with gloo(folder):
        for op in provided():
            arguments = right(op)
            truth = result(op, arguments)
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    coming = functional.all_reduce(value, "max", distributed.group.WORLD)
                    if not torch.equal(result(op, {**arguments, name: coming}), truth):
                        found.append(f"{op}, {name}: wrong")
                    if not coming.completed:
                        found.append(f"{op}, {name}: not awaited")
    return found


def test_results_of_functional_collectives_are_awaited(tmp_path: Path) -> None:
    found = mkernel.launch(
        with_results_under_way, str(tmp_path), ranks_per_node=RANKS, accelerator="streams"
    )
    assert found == [[]] * RANKS


def with_default_device() -> list[str]:
    """Calls where tensors without a device of their own have no memory."""
    found = []
    with torch.device("meta"):
        if mkernel.empty((4, 4), torch.float16).device.type != "cpu":
            found.append("symmetric memory is elsewhere")
    for op in provided():
        arguments = right(op)
        truth = result(op, arguments)
        with torch.device("meta"):
            made = result(op, arguments)
        if made.is_meta or not torch.equal(made, truth):
            found.append(f"{op}: wrong")
    return found


# ---- autograd and torch.compile around an op -----------------------------------------------------


def overwrite_saved() -> list[str]:
    """A backward that needs what an op has overwritten since."""
    found = []
    for op in OPS[:3]:
        arguments = right(op)
        for name in ("out", "gathered"):
            if name not in arguments:
                continue
            saved = arguments[name]
            weight = torch.ones_like(saved, requires_grad=True)
            loss = (weight * saved).sum()
            getattr(mkernel, op)(**arguments)
            try:
                loss.backward()
                found.append(f"{op}, {name}: wrong gradients, and nothing raised")
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
    return found


@pytest.mark.parametrize("look", [in_modes, as_parameters, with_default_device, overwrite_saved])
def test_torch_around_the_ops_is_heeded(look: Callable[[], list[str]]) -> None:
    """Modes that stand in for the data are refused, parameters pass where nothing records gradients,
    a default device does not reach the ops, and autograd hears of outputs that are overwritten."""
    assert kept_ranks.run(look, ranks_per_node=RANKS, accelerator="streams") == [[]] * RANKS


def compiled() -> list[str]:
    return [found for op in provided() if op not in SEEN_BY_TORCH for found in compiled_op(op)]


def compiled_op(op: str) -> Iterator[str]:
    """What is wrong with a compiled function with one op in it, which is one graph."""
    arguments, graphs = right(op), []
    truth = result(op, arguments)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count)
    def around(given: Arguments, scale: torch.Tensor) -> Any:
        made = getattr(mkernel, op)(**given)
        return (made.outputs if op == "moe_dispatch_gemm" else made) * (scale + 1)

    torch._dynamo.reset()  # each op is a function of its own
    one = torch.ones((), dtype=torch.float16)
    if not torch.equal(around(arguments, one), 2 * truth):
        yield f"{op}: wrong"
    if len(graphs) != 1:
        yield f"{op}: {len(graphs)} graphs, not one"
    name, value = next(iter(arguments.items()))
    wanting = {**arguments, name: with_gradient(value)}
    yield from refused(partial(around, wanting, one), ArgumentError, f"{name} = ", "requires grad")


def test_compiled_functions_do_not_look_into_an_op() -> None:
    found = kept_ranks.run(compiled, ranks_per_node=RANKS, accelerator="streams")
    assert found == [[]] * RANKS
