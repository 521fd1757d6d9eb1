"""Calls of a known signature start without Python, and mean what they mean through Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from in_world import DEADLINE_S, stores
from once import once
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mkernel
from mkernel.backends.transport import _transport
from mkernel.errors import MkernelError, Timeout
from mkernel.launch import host_store, report
from mkernel.ops.gemm import GemmCall
from mkernel.ops.gemm_all_reduce import OP
from mkernel.world import calls, lifecycle, torch_state
from mkernel.world.bootstrap import Bootstrap

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "starting_backend:Starting"
has_events = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="worlds whose calls are queued follow each other by events, which this torch's CPU has not",
)
M, N, K = 64, 40, 72


def backend() -> Any:
    return mkernel.world().accelerator


def inputs(iteration: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rank = mkernel.world().rank if rank is None else rank
    made = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn(M, K, generator=made), torch.randn(K, N, generator=made)


def error(out: torch.Tensor, iteration: int) -> float:
    parts = [inputs(iteration, rank) for rank in range(mkernel.world().size)]
    truth = sum((a.double() @ b.double() for a, b in parts), torch.zeros(M, N).double())
    return float((out.double() - truth).abs().max())


def began(call: Callable[[], object]) -> int:
    """How many calls of it began without Python."""
    before = len(backend().started)
    call()
    return len(backend().started) - before


def in_ranks(function: Callable[..., Any], ranks: int = 1, **world: Any) -> list[Any]:
    return mkernel.launch(
        function, ranks_per_node=ranks, accelerator=BACKEND, timeout_s=DEADLINE_S, **world
    )


# ---- what such calls are -------------------------------------------------------------------------


def repeated() -> tuple[list[int], list[int], list[int], tuple[int, bool], float]:
    outs, ways = [], []
    for iteration in range(6):
        if iteration == 3:  # through Python, between the others
            a, b = inputs(iteration)
            ways.append(
                began(lambda a=a, b=b: outs.append(mkernel.gemm_all_reduce(a, b, chunk=16)))
            )
            continue
        a, b = inputs(iteration)
        ways.append(began(lambda a=a, b=b: outs.append(mkernel.gemm_all_reduce(a, b))))
    number, key = mkernel.world()._failure.call
    mkernel.synchronize()
    worst = max(error(out, iteration) for iteration, out in enumerate(outs))
    calls = backend().calls
    return (
        ways,
        [call.number for call in calls],
        [call.epoch for call in calls],
        (number, key == calls[-1].plan.digest()),
        worst,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_they_have_the_numbers_and_results_of_all_calls(ranks: int) -> None:
    for ways, numbers, epochs, heartbeat, worst in in_ranks(repeated, ranks):
        assert ways == [0, 1, 1, 0, 1, 1]
        assert numbers == [1, 2, 3, 4, 5, 6]
        assert epochs == [1, 2, 3, 4, 5, 6]
        assert heartbeat == (6, True)
        assert worst < 1e-4


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass without behaviour of its own."""


def under(mode: Any, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with mode:
        return call()


def situations() -> dict[str, tuple[int, str, float]]:
    """By situation: calls that began without Python (of one), the error if it was refused, else how far
    the result is from that of the call through Python."""
    a, b = inputs(0)
    usual = mkernel.gemm_all_reduce(a, b)
    mkernel.gemm_all_reduce(a, b, out=torch.empty(M, N))
    op = torch.ops.mkernel.gemm_all_reduce
    group = mkernel.world().name
    leaf = a.clone().requires_grad_()
    weight = torch.nn.Parameter(b)
    odd = torch.empty(a.numel() + 1)[1:].view(M, K).copy_(a)
    found: dict[str, tuple[int, str, float]] = {}

    def look(name: str, call: Callable[[], torch.Tensor]) -> None:
        before, refused, apart = len(backend().started), "", 0.0
        try:
            out = call()
            mkernel.synchronize()
            apart = float((out.detach() - usual).abs().max())
        except MkernelError as error:
            refused = type(error).__name__
        found[name] = (len(backend().started) - before, refused, apart)

    def without(bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        mkernel.synchronize()
        return out - bias

    def call() -> torch.Tensor:
        return mkernel.gemm_all_reduce(a, b)

    look("plain", call)
    look("out", lambda: mkernel.gemm_all_reduce(a, b, out=torch.empty(M, N)))
    held = b.clone()
    look("out over b", lambda: mkernel.gemm_all_reduce(a, held, out=held[:M]))
    look("registered op, first", lambda: op(a, b, group=group))
    look("registered op, again", lambda: op(a, b, group=group))
    look("group", lambda: mkernel.gemm_all_reduce(a, b, group=mkernel.world()))
    look("requires grad", lambda: mkernel.gemm_all_reduce(leaf, b))
    look("no_grad", lambda: under(torch.no_grad(), lambda: mkernel.gemm_all_reduce(leaf, weight)))
    look("inference", lambda: under(torch.inference_mode(), call))
    look("dispatch mode", lambda: under(Quiet(), call))
    look("function mode", lambda: under(Functions(), call))
    look("default device", lambda: under(torch.device("cpu"), call))
    look("subclass", lambda: mkernel.gemm_all_reduce(a.as_subclass(Own), b))
    look("negated", lambda: mkernel.gemm_all_reduce(torch._neg_view(-a), b))
    look("unaligned", lambda: mkernel.gemm_all_reduce(odd, b))
    look("column-major, first", lambda: mkernel.gemm_all_reduce(a, b.t().contiguous().t()))
    look("column-major, again", lambda: mkernel.gemm_all_reduce(a, b.t().contiguous().t()))
    look("strided", lambda: mkernel.gemm_all_reduce(torch.cat((a, a), 1)[:, :K], b))
    none, bias = torch.zeros(N), torch.randn(N, generator=torch.Generator().manual_seed(3))
    look("bias, first", lambda: mkernel.gemm_all_reduce(a, b, bias=none))
    look("bias, again", lambda: without(bias, mkernel.gemm_all_reduce(a, b, bias=bias)))
    look(
        "every second of a bias",
        lambda: mkernel.gemm_all_reduce(a, b, bias=torch.zeros(2 * N)[::2]),
    )
    look("chunk", lambda: mkernel.gemm_all_reduce(a, b, chunk=16))
    look("compiled", lambda: torch.compile(mkernel.gemm_all_reduce, backend="eager")(a, b))
    look("vmap", lambda: torch.vmap(lambda one: mkernel.gemm_all_reduce(one, b))(a[None])[0])
    look("waited for", lambda: OP.call(GemmCall(a, b), wait=True).outputs["out"])
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, tuple[int, str, float]]:
    return once(request, lambda: dict(in_ranks(situations)[0]))


def test_results_are_those_of_calls_through_python(
    found: dict[str, tuple[int, str, float]],
) -> None:
    assert {name: apart for name, (_, _, apart) in found.items() if apart > 1e-5} == {}


def test_they_are_taken_only_where_nothing_else_has_to_see_the_call(
    found: dict[str, tuple[int, str, float]],
) -> None:
    taken = {name for name, (calls, _, _) in found.items() if calls}
    # Gradients are recorded, compiled code runs and modes see the registered op outside of its kernel,
    # which then begins such a call.
    assert taken == {
        "plain", "out", "registered op, again", "group", "requires grad", "no_grad", "inference",
        "column-major, again", "bias, again", "compiled", "dispatch mode", "function mode",
        "default device",
    }  # fmt: skip


def test_refusals_are_those_of_calls_through_python(
    found: dict[str, tuple[int, str, float]],
) -> None:
    refused = {name: kind for name, (_, kind, _) in found.items() if kind}
    assert refused.keys() >= {"vmap", "out over b"}
    assert set(refused.values()) <= {"Unsupported", "ArgumentError", "LayoutError"}


def from_threads(threads: int, calls: int) -> tuple[list[int], int, float]:
    """Numbers of all calls, how many began without Python, and the largest error."""
    mkernel.gemm_all_reduce(*inputs(0))
    worst = [float("nan")] * threads

    def several(thread: int) -> None:
        outs = []
        for number in range(calls):
            outs.append(mkernel.gemm_all_reduce(*inputs(number % 7)))
            if number % 50 == 49:
                mkernel.synchronize()
        mkernel.synchronize()
        worst[thread] = max(error(out, number % 7) for number, out in enumerate(outs))

    running = [threading.Thread(target=several, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    numbers = [call.number for call in backend().calls]
    return numbers, len(backend().started), max(worst)


def test_any_thread_may_call() -> None:
    """Backward has its own: a call that finds another under way waits for it in Python."""
    ((numbers, started, worst),) = mkernel.launch(
        from_threads, 3, 300, ranks_per_node=1, accelerator=BACKEND, timeout_s=DEADLINE_S
    )
    assert numbers == [*range(1, 902)]
    assert started > 100
    assert worst < 1e-4


def written() -> tuple[int, int]:
    a, b = inputs(0)
    out = torch.empty(M, N)
    mkernel.gemm_all_reduce(a, b, out=out)
    mkernel.synchronize()
    before = out._version
    taken = began(lambda: mkernel.gemm_all_reduce(a, b, out=out))
    mkernel.synchronize()
    return taken, out._version - before


def test_autograd_hears_that_an_output_was_written() -> None:
    assert in_ranks(written) == [(1, 1)]


def in_symmetric_memory() -> list[tuple[str, int, dict[str, tuple[int, ...]]]]:
    a, b = inputs(0)
    ours, other = (mkernel.empty((M, N), dtype=torch.float32) for _ in range(2))
    found = []
    for name, out in (
        ("private", torch.empty(M, N)), ("ours", ours), ("other", other), ("ours", ours),
        ("other", other), ("private", torch.empty(M, N)),
    ):  # fmt: skip
        taken = began(lambda out=out: mkernel.gemm_all_reduce(a, b, out=out))
        found.append((name, taken, dict(backend().calls[-1].symmetric)))
    return found


def test_a_place_in_symmetric_memory_is_part_of_the_signature() -> None:
    (found,) = in_ranks(in_symmetric_memory)
    assert [taken for _, taken, _ in found] == [0, 0, 0, 1, 1, 1]
    places = {name: symmetric for name, _, symmetric in found[:3]}
    assert places["private"] == {}
    assert places["ours"] != places["other"]
    assert all(symmetric == places[name] for name, _, symmetric in found)


# ---- when they are not known any more ------------------------------------------------------------


def forgotten(shapes: int) -> list[int]:
    """Whether the first shape is known, after so many others."""
    world = mkernel.world()
    for recent in (world._calls._agreement._agreed, world._membership.engine.heap._plans):
        recent.most = 4
    a, b = inputs(0)
    found = []
    mkernel.gemm_all_reduce(a, b)
    found.append(began(lambda: mkernel.gemm_all_reduce(a, b)))
    for rows in range(1, shapes + 1):
        mkernel.gemm_all_reduce(torch.ones(rows, 8), torch.ones(8, 8))
    found.append(began(lambda: mkernel.gemm_all_reduce(a, b)))
    found.append(began(lambda: mkernel.gemm_all_reduce(a, b)))
    return found


@pytest.mark.parametrize(("shapes", "wanted"), [(2, [1, 1, 1]), (20, [1, 0, 1])])
def test_what_the_world_forgets_is_agreed_on_again(shapes: int, wanted: list[int]) -> None:
    assert mkernel.launch(
        forgotten, shapes, ranks_per_node=2, accelerator=BACKEND, timeout_s=DEADLINE_S
    ) == [wanted, wanted]


def declines() -> tuple[int, list[int], float]:
    mkernel.gemm_all_reduce(*inputs(0))
    backend().answer = 1
    taken = began(lambda: mkernel.gemm_all_reduce(*inputs(0)))
    backend().answer = 0
    out = mkernel.gemm_all_reduce(*inputs(0))
    mkernel.synchronize()
    return taken, [call.number for call in backend().calls], error(out, 0)


def test_what_a_starter_declines_is_launched_from_python_under_the_same_number() -> None:
    for taken, numbers, wrong in in_ranks(declines, 2):
        assert taken == 0
        assert numbers == [1, 2, 3]
        assert wrong < 1e-4


def told() -> None:
    mkernel.world()._failure.tell(Timeout("planted"))


def recorded() -> None:
    """As kernels record it, which nobody has heard of yet."""
    who = _transport.Diagnosis()
    who.waiter, who.peer, who.signal = _transport.Waiter.compute_kernel, 0, 77
    _transport.record_failure(backend().record(), _transport.AbortCode.timeout, who)


def breaks(plant: Callable[[], None]) -> None:
    a, b = inputs(0)
    for _ in range(2):
        mkernel.gemm_all_reduce(a, b)
    mkernel.synchronize()
    taken = len(backend().started)
    plant()
    try:
        mkernel.gemm_all_reduce(a, b)
    except MkernelError as error:
        report((type(error).__name__, str(error), len(backend().started) - taken))
        raise


@pytest.mark.parametrize(
    ("plant", "begins"), [(told, "planted (kept for "), (recorded, "rank 0 compute_kernel ")]
)
def test_a_broken_world_is_raised_at_the_next_call(plant: Any, begins: str) -> None:
    seen: dict[int, Any] = {}
    with pytest.raises(MkernelError):
        in_ranks(partial(breaks, plant), on_report=seen.__setitem__)
    name, message, taken = seen[0]
    assert (name, taken) == ("Timeout", 0)
    assert message.startswith(begins)


def of_two_worlds(port: int) -> tuple[list[int], list[int], float]:
    """Whether calls of two worlds began without Python; the second's numbers; the largest error."""
    ways, outs = [], []

    def call(world: Any) -> None:
        accelerator = world.accelerator
        before = len(accelerator.started)
        outs.append(mkernel.gemm_all_reduce(a, b, group=world))
        ways.append(len(accelerator.started) - before)

    a, b = inputs(0)
    first = mkernel.world()
    call(first)
    call(first)
    other = lifecycle.join(first.identity, first.backends, first.settings, stores(port), "other")
    for world in (first, first, other, other, first, other):
        call(world)
    other.synchronize()
    numbers = [call.number for call in other.accelerator.calls]  # type: ignore[attr-defined]
    other.close()
    call(first)
    mkernel.synchronize()
    return ways, numbers, max(error(out, 0) for out in outs)


@has_events
def test_calls_of_several_worlds_follow_each_other_on_their_stream() -> None:
    store, port = host_store(1, 30)
    ((ways, numbers, worst),) = mkernel.launch(
        of_two_worlds, port, ranks_per_node=1, accelerator=BACKEND, timeout_s=DEADLINE_S
    )
    assert ways == [0, 1, 1, 1, 0, 1, 1, 1, 1]
    assert numbers == [1, 2, 3]
    assert worst < 1e-4
    del store


def steps_of(world: Any, turns: int, ready: threading.Barrier, found: list[float]) -> None:
    """Forward and backward in one world, beside another thread's in another; the largest errors."""
    ready.wait(60)
    for turn in range(turns):
        a, b = inputs(turn)
        a.requires_grad_()
        b.requires_grad_()
        out = mkernel.gemm_all_reduce(a, b, group=world)
        mkernel.synchronize(
            group=world
        )  # this backend's calls end later, and no stream orders them
        out.square().sum().backward()
        exact = a.detach().double() @ b.detach().double()
        wanted = (exact, 2 * exact @ b.detach().double().t(), a.detach().double().t() @ (2 * exact))
        for one, other in zip((out.detach(), a.grad, b.grad), wanted, strict=True):
            assert one is not None
            found.append(float((one.double() - other).norm() / other.norm()))


def two_worlds_at_once(port: int, turns: int) -> tuple[list[list[int]], float, int]:
    """Numbers of the calls of two worlds, each of a thread of its own; the largest error; how many
    errors were measured."""
    first = mkernel.world()
    other = lifecycle.join(first.identity, first.backends, first.settings, stores(port), "other")
    ready, found = threading.Barrier(2), list[float]()
    running = [
        threading.Thread(target=steps_of, args=(world, turns, ready, found))
        for world in (first, other)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    numbers = [[call.number for call in world.accelerator.calls] for world in (first, other)]  # type: ignore[attr-defined]
    other.close()
    return numbers, max(found), len(found)


@has_events
def test_two_threads_train_in_two_worlds_at_once() -> None:
    store, port = host_store(1, 30)
    ((numbers, worst, measured),) = mkernel.launch(
        two_worlds_at_once, port, 60, ranks_per_node=1, accelerator=BACKEND, timeout_s=DEADLINE_S
    )
    assert numbers == [[*range(1, 61)]] * 2
    assert measured == 2 * 60 * 3
    assert worst < 1e-5
    del store


# ---- a torch that lets nobody read tensors from native code --------------------------------------

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
OTHER_MAJOR = (ctypes.c_uint64 * 8)(2)  # version 2.0, no older table, and functions that are null
TABLES: dict[str, Callable[[], object]] = {
    "before torch 2.10": lambda: None,
    "another version": lambda: _new_capsule(
        ctypes.addressof(OTHER_MAJOR), b"dlpack_exchange_api", None
    ),
}


def without_exchange(table: str, port: int) -> tuple[list[int], float, int]:
    """Calls that began without Python in a world that has no exchange table; the largest error; by how
    much an output's version rose."""
    functions = torch_state.native_functions("cpu") | {"exchange": TABLES[table]()}
    first = mkernel.world()
    with mock.patch.object(calls, "native_functions", return_value=functions):
        other = lifecycle.join(
            first.identity, first.backends, first.settings, stores(port), "other"
        )
    ways, outs = [], []
    for iteration in range(4):
        a, b = inputs(iteration)
        before = len(other.accelerator.started)  # type: ignore[attr-defined]
        outs.append(mkernel.gemm_all_reduce(a, b, group=other))
        ways.append(len(other.accelerator.started) - before)  # type: ignore[attr-defined]
    a, b = inputs(0)
    out = torch.empty(M, N)
    for _ in range(2):
        before = out._version
        mkernel.gemm_all_reduce(a, b, out=out, group=other)
    other.synchronize()
    version = out._version - before
    other.close()
    return ways, max(error(each, iteration) for iteration, each in enumerate(outs)), version


@has_events
@pytest.mark.parametrize("table", TABLES)
def test_tensors_are_read_by_their_attributes_where_there_is_no_exchange_table(table: str) -> None:
    store, port = host_store(1, 30)
    ((ways, worst, version),) = mkernel.launch(
        without_exchange, table, port, ranks_per_node=1, accelerator=BACKEND, timeout_s=DEADLINE_S
    )
    assert ways == [0, 1, 1, 1]
    assert (worst < 1e-4, version) == (True, 1)
    del store


# ---- what they cost ------------------------------------------------------------------------------


def asked_of_the_store(shapes: int) -> int:
    """Requests of the store that this rank's calls of so many new shapes make."""
    requests = 0
    ask = Bootstrap._request
    calling = threading.get_ident()  # the watchdog has its own

    def counted(self: Bootstrap, action: Callable[[], Any]) -> Any:
        nonlocal requests
        requests += threading.get_ident() == calling
        return ask(self, action)

    mkernel.gemm_all_reduce(torch.ones(shapes + 1, 8), torch.ones(8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bootstrap, "_request", counted)
        for rows in range(1, shapes + 1):
            mkernel.gemm_all_reduce(torch.ones(rows, 8), torch.ones(8, 8))
    mkernel.synchronize()
    return requests


def test_first_calls_in_one_node_ask_nothing_of_the_store() -> None:
    assert mkernel.launch(
        asked_of_the_store, 50, ranks_per_node=2, accelerator=BACKEND, timeout_s=DEADLINE_S
    ) == [0, 0]


def grown(calls: int) -> tuple[int, int, int]:
    """(calls without Python, objects that the collector knows, blocks of memory) more after so many."""
    a, b = inputs(0)
    mkernel.gemm_all_reduce(a, b)

    def several(count: int) -> None:
        for _ in range(count):
            mkernel.gemm_all_reduce(a, b)
            mkernel.synchronize()

    def forget() -> None:  # what this backend remembers for the tests
        backend().started.clear()
        backend().calls.clear()

    several(50)
    forget()
    gc.collect()
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    taken = began(lambda: several(calls))
    forget()
    gc.collect()
    return taken, len(gc.get_objects()) - objects, sys.getallocatedblocks() - blocks


@pytest.mark.slow
def test_calls_leave_no_object_behind() -> None:
    ((taken, objects, blocks),) = mkernel.launch(
        grown, 10_000, ranks_per_node=1, accelerator=BACKEND, timeout_s=DEADLINE_S
    )
    assert taken == 10_000
    assert objects < 50
    assert blocks < 500
