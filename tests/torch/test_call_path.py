"""From its second call on an op starts without Python: no function of ours runs between a registered
op's entry and the launch, however it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import mkernel
from mkernel.ops import gemm_all_reduce
from mkernel.ops.registration import ops

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

OURS = str(Path(mkernel.__file__).parent)
RANKS = 2
M, N, K, B = 8, 24, 16, 2


class Watch:
    """The functions of the library that ran before the next launch, by name."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.launches = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        if code.co_qualname.endswith("_starter.<locals>.start"):  # the Python starter of a backend
            self.launches += 1
            self.launched = True
        elif not self.launched:
            self.before.append(code.co_qualname)

    def of(self, call: Callable[[], object]) -> tuple[int, list[str]]:
        """Return how many launches a call made by starters, and what ran before the first of them."""
        self.launched, self.launches, self.before = False, 0, []
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self.launches, self.before


def ways() -> dict[str, tuple[Callable[[], object], set[str]]]:
    """By name: a call, and what of the library it may run before the launch: the public function, or
    the derivative, in which ops are called."""
    world = mkernel.world()
    group, registered = world.name, torch.ops.mkernel
    a, b, bias = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
    x, weight = torch.randn(B, M, K), b.clone().requires_grad_()
    leaf, square = a.clone().requires_grad_(), torch.randn(K, K)
    norm, out = torch.ones(K), torch.empty(M, N)
    q = torch.randn(1, 2, M, 16)
    expert, ids = torch.randn(2, K, N), torch.randint(0, 2 * world.size, (M, 2))
    options: dict[str, Any] = {"group": group}

    def compiled(backend: str) -> Callable[[], object]:
        function = torch.compile(ops_in, backend=backend, fullgraph=True, dynamic=False)
        return lambda: function(a, b)

    def ops_in(a: Tensor, b: Tensor) -> Tensor:
        return registered.all_gather_gemm(a, b, group=group).relu()

    def backward(call: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: call().sum().backward()

    derivative = {"_function.<locals>.setup", "_function.<locals>.differentiate"}
    found: dict[str, tuple[Callable[[], object], set[str]]] = {
        "gather": (lambda: ops.all_gather_gemm(a, b), set()),
        "scatter": (lambda: ops.gemm_reduce_scatter(a, b), set()),
        "reduce": (lambda: ops.gemm_all_reduce(a, b), set()),
        "bias": (lambda: ops.gemm_all_reduce(a, b, bias), set()),
        "dimension 1": (lambda: ops.all_gather_gemm(x, b, gather_dim=1), set()),
        "a of gaps": (lambda: ops.all_gather_gemm(a.repeat(1, 2)[:, ::2], b), set()),
        "registered": (lambda: registered.all_gather_gemm(a, b, group=group), set()),
        "several": (lambda: ops.all_gather_gemms(a, [b, b[:, :8]], [], **options), set()),
        "gathered": (lambda: ops.all_gather_gemm_gathered(a, b), set()),
        "into": (
            lambda: gemm_all_reduce.OP.into(
                a, b, None, out, None, None, None, False, 0, None, None, None, None
            ),
            set(),
        ),
        "norm": (lambda: ops.gemm_all_reduce_norm(a, square, norm, a), set()),
        "sum": (lambda: ops.all_reduce(a), set()),
        "sum beside a prefetch": (lambda: ops.all_reduce(a, prefetch=torch.randn(K, N)), set()),
        "normalised sum": (lambda: ops.all_reduce_norm(a, norm, a), set()),
        "attention": (lambda: ops.ring_attention(q, q, q), set()),
        "no gradients": (lambda: no_grad(lambda: ops.all_gather_gemm(a, weight)), set()),
        "recorded": (lambda: ops.all_gather_gemm(a, weight), set()),
        "recorded, registered": (
            lambda: registered.all_gather_gemm(a, weight, group=group), set(),
        ),
        "backward": (backward(lambda: ops.all_gather_gemm(leaf, weight)), derivative),
        "aot_eager": (compiled("aot_eager"), set()),
        "inductor": (compiled("inductor"), set()),
        # Values that lie on a CPU are looked at before each launch.
        "dispatch": (
            lambda: ops.moe_dispatch_gemm(torch.randn(M, K), ids, expert), {"expect_experts"},
        ),
    }  # fmt: skip
    return found


def no_grad(call: Callable[[], object]) -> object:
    with torch.no_grad():
        return call()


def watched() -> dict[str, str]:
    """By way: what is wrong with its third call."""
    watch, wrong = Watch(), {}
    for name, (call, allowed) in ways().items():
        for _ in range(2):
            call()
        launches, before = watch.of(call)
        more = [each for each in before if each not in allowed]
        if more or not launches:
            wrong[name] = f"{launches} launches; before the first ran {more}"
    return wrong


def test_no_function_of_ours_runs_before_a_launch() -> None:
    assert on_ranks(watched) == [{}] * RANKS


def unlearned() -> tuple[int, list[str]]:
    """The same of calls that native code is kept from learning, which must be seen."""
    from mkernel.ops.steps import Steps

    a, b = torch.randn(M + 1, K), torch.randn(K, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "learn", lambda *_: None)
        ops.gemm_all_reduce(a, b)
        return Watch().of(lambda: ops.gemm_all_reduce(a, b))


def test_calls_that_python_makes_are_noticed() -> None:
    for launches, before in on_ranks(unlearned):
        assert launches == 0
        assert "Calls._run" in before


class Seen(TorchDispatchMode):
    """The ops that torch's dispatcher shows a mode, of compiled functions too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **kwargs or {})


def by_inductor() -> tuple[bool, list[str], list[str], float]:
    """Return whether Inductor's code calls an op's kernel, what a mode and a profiler see of that call,
    and how far its result is off."""
    group = mkernel.world().name
    a, b = torch.randn(M, K), torch.randn(K, N)

    def program(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.mkernel.gemm_all_reduce(a, b, group=group).relu()

    compiled = torch.compile(program, fullgraph=True)
    found, (code, *_) = run_and_get_code(compiled, a, b)
    with Seen() as seen:
        again = compiled(a, b)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        compiled(a, b)
    ranges = [event.key for event in profiled.key_averages() if "gemm_all_reduce" in event.key]
    direct = "torch.ops.mkernel.kernels.gemm_all_reduce(" in code
    wanted = program(a, b)
    off = max(float((each - wanted).abs().max()) for each in (found, again))
    return direct, [name for name in seen.names if "mkernel" in name], ranges, off


def test_inductors_code_calls_kernels_and_hides_nothing() -> None:
    for direct, seen, ranges, off in on_ranks(by_inductor):
        assert direct
        assert seen == ["mkernel.gemm_all_reduce.default"]
        assert ranges == ["mkernel.gemm_all_reduce"]
        assert off == 0.0
