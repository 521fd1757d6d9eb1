"""Styles of parallelize_module: models have the results and the gradients of the unsharded ones."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, ranks
from once import once
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mkernel
from mkernel.errors import ArgumentError, NotInitialized
from mkernel.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from mkernel.ops import shared_input
from mkernel.world.world import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
B, S, H, N = 3, 8, 12, 20


def mesh_of_all() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (RANKS,))
    mkernel.init(mesh, accelerator="streams", timeout_s=TIMEOUT_S)
    return mesh


def calls(mesh: DeviceMesh) -> Callable[[], Counter[str]]:
    """What counts the calls that a world has run since now, by op."""
    world = mkernel.world(mesh)
    before = Counter(world.statistics().calls)
    return lambda: Counter(world.statistics().calls) - before


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---- a pair of layers ----------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, N, bias=bias), nn.Linear(N, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


def pair(split: int | None, bias: bool, local: bool, compiled: bool) -> dict[str, int]:
    mesh = mesh_of_all()
    torch.manual_seed(0)
    reference = Mlp(bias)
    outside = Replicate() if split is None else Shard(split)
    plan = {
        "up": ColwiseParallel(input_layouts=outside),
        "down": RowwiseParallel(output_layouts=outside, use_local_output=local),
    }
    model = parallelize_module(copy.deepcopy(reference), mesh, plan)
    found = calls(mesh)
    x = torch.randn(B + 1, S, H, requires_grad=True)
    wanted = reference(x)
    wanted.sin().sum().backward()

    part = x.detach() if split is None else x.detach().chunk(RANKS, split)[mesh.get_local_rank()]
    part = part.clone().requires_grad_()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(part) if compiled else model(part)
    assert isinstance(y, DTensor) == (not local)
    y.sin().sum().backward()

    def gathered(piece: Tensor) -> Tensor:
        return DTensor.from_local(piece, mesh, [outside], run_check=False).full_tensor()

    assert x.grad is not None
    assert part.grad is not None
    y = y.to_local() if isinstance(y, DTensor) else y
    close([gathered(y.detach()), gathered(part.grad)], [wanted.detach(), x.grad])
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(one, DTensor)
        close([whole(one.grad)], [whole(other.grad)])
    return dict(found())


@pytest.mark.parametrize(
    ("split", "bias", "local", "compiled"),
    [
        (None, True, True, False),
        (None, False, False, False),
        (0, False, True, False),
        (1, True, True, False),
        (1, False, False, False),
        (1, True, True, True),
    ],
)
def test_a_pair_is_the_unsharded_one(
    split: int | None, bias: bool, local: bool, compiled: bool, tmp_path: Path
) -> None:
    wanted = {"gemm_all_reduce": 2}
    if split is not None:
        wanted = {"all_gather_gemm": 2, "gemm_reduce_scatter": 2}
    for found in ranks(pair, tmp_path, split, bias, local, compiled, size=RANKS):
        assert found == wanted


# ---- layers of one input -------------------------------------------------------------------------


class Three(nn.Module):
    """Layers of unlike widths, some with a bias. ``use`` computes what is trained of them and an input,
    element by element, so that what ranks compute of their features are parts of it."""

    def __init__(self, use: Callable[[Three, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(H, N), nn.Linear(H, 4, bias=False), nn.Linear(H, 6)
        self.use, self.parallel = use, False

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def all_three(m: Three, x: Tensor) -> Tensor:
    return m.q(x).sin().sum() + m.k(x).cos().sum() + m.v(x).exp().sum()


def of_a_result(m: Three, x: Tensor) -> Tensor:
    return all_three(m, x.tanh())


def written_to(m: Three, x: Tensor) -> Tensor:
    """Write to what layers return, which is their caller's."""
    return m.q(x).mul_(2).sin().sum() + m.k(x).mul_(2).sum() + m.v(x).mul_(2).exp().sum()


def some_used(m: Three, x: Tensor) -> Tensor:
    """The first layer's result is not used, and another only without a gradient."""
    m.q(x)
    return m.k(x).detach().sum() + m.v(x).exp().sum()


def modified(m: Three, x: Tensor) -> Tensor:
    """The tensor is the same, but what q and the others read of it is not."""
    x = x.sin()
    first = m.q(x).sin().sum()
    x = x.mul_(2) if m.parallel else x * 2
    return first + m.k(x).cos().sum() + m.v(x).exp().sum()


def unlike(m: Three, x: Tensor) -> Tensor:
    """Another tensor of the same size."""
    other = 2 * x
    return m.q(x).sin().sum() + m.k(other).cos().sum() + m.v(other).exp().sum()


def on_two_streams(m: Three, x: Tensor) -> Tensor:
    """Nothing orders a product behind a gather of another stream."""
    with mock.patch.object(shared_input, "stream_of", return_value=(1, False)):
        first = m.q(x).sin().sum()
    with mock.patch.object(shared_input, "stream_of", return_value=(2, False)):
        return first + m.k(x).cos().sum() + m.v(x).exp().sum()


def captured(number: int) -> ExitStack:
    """A capture of the current stream."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(shared_input, "stream_of", return_value=(1, True)))
    stack.enter_context(mock.patch.object(World, "capture", return_value=number))
    return stack


def in_two_graphs(m: Three, x: Tensor) -> Tensor:
    """A graph may be replayed without what another one has captured."""
    with captured(1):
        first = m.q(x).sin().sum()
    with captured(2):
        return first + m.k(x).cos().sum() + m.v(x).exp().sum()


def one_twice(m: Three, x: Tensor) -> Tensor:
    return m.q(x).sin().sum() + m.q(x).cos().sum()


def inside_another(m: Three, x: Tensor) -> Tensor:
    """A pass of backward runs inside another one of the same graph, and takes nothing of its terms."""
    of_q, k, of_v = m.q(x).sin().sum(), m.k(x), m.v(x).exp().sum()

    def inner(gradient: Tensor) -> None:
        torch.autograd.grad(of_q, x, retain_graph=True)

    k.register_hook(inner)  # runs when v has left its term
    return of_q + k.cos().sum() + of_v


def after_no_grad(m: Three, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = m.q(x).sum()
    return first + m.k(x).cos().sum() + m.v(x).exp().sum()


def again(m: Three, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(partial(all_three, m), x, use_reentrant=False)
    return found


def products_saved(m: Three, x: Tensor) -> Tensor:
    """Two regions of one input, of which the products of torch are kept."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    kept = partial(create_selective_checkpoint_contexts, saved)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": kept}
    first: Tensor = checkpoint(lambda x: m.k(x).cos().sum(), x, **options)
    second: Tensor = checkpoint(lambda x: m.q(x).exp().sum() + m.v(x).exp().sum(), x, **options)
    return first + second


class Nothing(torch.autograd.Function):
    """The identity, whose derivative is left out."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> None:
        return None


def undefined(m: Three, x: Tensor) -> Tensor:
    found = [Nothing.apply(layer(x)).sum() for layer in (m.q, m.k, m.v)]  # type: ignore[no-untyped-call]
    return x.mul(0).sum() + found[0] + found[1] + found[2]


USES: dict[Callable[[Three, Tensor], Tensor], tuple[int, int]] = {
    all_three: (1, 1),
    of_a_result: (1, 1),
    written_to: (1, 1),
    some_used: (1, 1),
    modified: (2, 2),
    unlike: (2, 2),
    on_two_streams: (2, 2),
    in_two_graphs: (2, 2),
    one_twice: (2, 2),
    inside_another: (1, 2),
    after_no_grad: (1, 1),
    undefined: (1, 0),
    again: (2, 1),
    products_saved: (4, 2),
}
"""The gathers and the sums over ranks of forward and backward."""
EAGER = (on_two_streams, in_two_graphs, one_twice, inside_another, undefined, again, products_saved)
"""Those that gather less where they are compiled, or of which compilers take other ways."""
BOTH = (all_three, modified)
"""Those that are compiled also where nothing is gathered."""
OUTSIDE: dict[str, Placement] = {"gathered": Shard(1), "replicated": Replicate()}
Wrong = list[str]


def of_one_input(mesh: DeviceMesh, outside: Placement) -> Callable[..., tuple[Wrong, Counter[str]]]:
    """What compares a step of parallel layers with the unsharded ones in float64, and returns what is
    wrong, and the calls."""

    def step(
        use: Callable[[Three, Tensor], Tensor],
        backend: str = "",
        prepared: bool = False,
        of_input: bool = True,
        backward: Callable[[Tensor, Three], None] = lambda loss, model: loss.backward(),  # type: ignore[no-untyped-call]
    ) -> tuple[Wrong, Counter[str]]:
        torch.manual_seed(0)
        reference = Three(use)
        reference.q.requires_grad_(
            use is not modified
        )  # else torch refuses to write to what it saved
        style = ColwiseParallel(input_layouts=Replicate() if prepared else outside)
        plan: dict[str, Any] = dict.fromkeys("qkv", style)
        if prepared:
            layouts = {"input_layouts": (outside,), "desired_input_layouts": (Replicate(),)}
            plan[""] = PrepareModuleInput(**layouts)
        model: Any = parallelize_module(copy.deepcopy(reference), mesh, plan)
        model.parallel = True
        reference.double()
        x = torch.randn(B, S, H)
        true = x.double().requires_grad_(of_input)
        wanted = reference(true)
        backward(wanted, reference)
        part = x if outside.is_replicate() else x.chunk(RANKS, 1)[mesh.get_local_rank()]
        part = part.clone().requires_grad_(of_input)
        found = calls(mesh)
        if backend:
            torch._dynamo.reset()
            model = torch.compile(model, backend=backend, fullgraph=True)
        loss = model(part)
        backward(loss, model)
        counted = found()
        wrong = []

        def compare(name: str, one: Tensor | None, other: Tensor | None) -> None:
            if (one is None) != (other is None):
                wrong.append(f"{name} is {one}, not {other}")
            if one is None or other is None:
                return
            if not torch.allclose(whole(one).double(), other, rtol=1e-5, atol=1e-5):
                wrong.append(name)

        def over(local: Tensor, placement: Placement) -> Tensor:
            return DTensor.from_local(local, mesh, [placement], run_check=False)

        compare("loss", over(loss.detach(), Partial()), wanted.detach())
        compare("x", None if part.grad is None else over(part.grad, outside), true.grad)
        for name, each in reference.named_parameters():
            compare(name, model.get_parameter(name).grad, each.grad)
        return wrong, counted

    return step


def passes(loss: Tensor, model: Three) -> None:
    """A pass that never comes to the input, and two that do."""
    torch.autograd.grad(loss, [model.q.weight], retain_graph=True)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def kept(mesh: DeviceMesh) -> list[int]:
    """How many gathered tensors there are while an input is used, when the program has lost it, and
    after the backward pass: without gradients, of a leaf, and of a result."""
    counts = []
    style = ColwiseParallel(input_layouts=Shard(1))
    model = parallelize_module(Three(all_three), mesh, dict.fromkeys("qkv", style))

    def count() -> None:
        tensors = (each for each in gc.get_objects() if type(each) is Tensor)
        counts.append(sum(each.shape == (B + 2, S, H) for each in tensors))

    gc.collect()
    gc.disable()  # what is in a cycle would stay
    for needs, leaf in ((False, True), (True, True), (True, False)):
        x = torch.randn(B + 2, S // RANKS, H, requires_grad=needs)
        x = x if leaf else x.sin()
        with torch.set_grad_enabled(needs):
            loss = model(x)
        count()
        del x
        count()
        if needs:
            loss.backward()
        del loss
        count()
    gc.enable()
    return counts


def uncounted(mesh: DeviceMesh) -> tuple[bool, Counter[str]]:
    """Whether layers read what an inference tensor holds when they are called; torch does not count
    what is written to it."""
    model: Any = parallelize_module(
        Three(modified), mesh, dict.fromkeys("qkv", ColwiseParallel(input_layouts=Shard(1)))
    )
    x = torch.randn(B, S // RANKS, H)
    found = calls(mesh)
    with torch.inference_mode():
        wanted = model(x.clone())
        counted = found()
        model.parallel = True
        return torch.equal(model(x.clone()), wanted), counted


def every_use() -> tuple[dict[tuple[str, str, str], tuple[Wrong, Counter[str]]], Any, Any]:
    mesh, found = mesh_of_all(), {}
    for name, outside in OUTSIDE.items():
        step = of_one_input(mesh, outside)
        for use in USES:
            found[name, use.__name__, ""] = step(use)
            if use not in EAGER and (name == "gathered" or use in BOTH):
                found[name, use.__name__, "aot_eager"] = step(use, "aot_eager")
            if use is all_three and name == "gathered":
                found[name, use.__name__, "inductor"] = step(use, "inductor")
        for backend in ("", "aot_eager"):
            found[name, "prepared", backend] = step(all_three, backend, prepared=True)
            found[name, "no input's", backend] = step(all_three, backend, of_input=False)
        found[name, "passes", ""] = step(all_three, backward=passes)
    return found, kept(mesh), uncounted(mesh)


@pytest.fixture(scope="module")
def uses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("uses")
    return once(request, lambda: ranks(every_use, folder, size=RANKS))


def test_layers_of_one_input_are_the_unsharded_ones(uses: list[Any]) -> None:
    for found, _, _ in uses:
        assert {key: wrong for key, (wrong, _) in found.items() if wrong} == {}


def test_layers_of_one_input_gather_it_once_and_sum_its_gradients_once(uses: list[Any]) -> None:
    counts = {use.__name__: count for use, count in USES.items()}
    counts |= {"prepared": (1, 1), "no input's": (1, 0), "passes": (1, 2)}
    for found, _, _ in uses:
        assert len(found) == 2 * (len(USES) + 5) + len(USES) - len(EAGER) + len(BOTH) + 1
        for (outside, use, backend), (_, calls_found) in found.items():
            gathers, sums = counts[use]
            wanted = {"all_gather_gemm": gathers, "gemm_reduce_scatter": sums}
            if outside == "replicated":
                wanted = {"gemm_all_reduce": sums}
            assert calls_found == Counter(wanted), (outside, use, backend)


def test_what_was_gathered_lives_no_longer_than_the_input_and_its_graph(uses: list[Any]) -> None:
    for _, counts, _ in uses:
        assert counts == [1, 0, 0, 1, 1, 0, 1, 1, 0]


def test_nothing_is_shared_of_what_torch_does_not_count_changes_of(uses: list[Any]) -> None:
    for _, _, found in uses:
        assert found == (True, Counter(all_gather_gemm=3))


def strangers() -> tuple[bool, list[str]]:
    """Whether what no op computes is torch's; what is said of what cannot be."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def refused(style: Any) -> str:
        try:
            parallelize_module(nn.Linear(H + 1, N + 1), mesh, style)
        except (ArgumentError, NotInitialized) as error:
            return str(error)
        return "nothing"

    said = [refused(ColwiseParallel())]
    mkernel.init(mesh, accelerator="streams", timeout_s=TIMEOUT_S)
    said += [refused(ColwiseParallel()), refused(RowwiseParallel())]
    found = calls(mesh)
    torch.manual_seed(1)
    reference = nn.Linear(H, N)
    model = parallelize_module(
        copy.deepcopy(reference), mesh, ColwiseParallel(output_layouts=Replicate())
    )
    x = torch.randn(S, H)
    right = torch.allclose(whole(model(x)), reference(x), atol=1e-5)
    parallelize_module(nn.Embedding(N, H), mesh, RowwiseParallel(input_layouts=Replicate()))
    return right and not found(), said


def test_what_no_op_computes_is_left_to_torch(tmp_path: Path) -> None:
    for right, said in ranks(strangers, tmp_path, size=RANKS):
        assert right
        assert "mkernel.init" in said[0]
        assert f"out_features = {N + 1}" in said[1]
        assert f"in_features = {H + 1}" in said[2]
