"""No field of a plan of ``hopper`` is decoration: another value is another launch, or is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import devices
import pytest
import torch
from hopper_calls import CONTEXT, WORKSPACES, gpus, last_rank
from plan_walk import Launch, WalkedWorld, decorations

from mkernel.backends.accelerators.cuda import machine
from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.capabilities import OPS
from mkernel.backends.accelerators.cuda.collectives import all_reduce, mail, norm
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm import (
    gather_parts,
    library,
    parts_exchange,
    products,
    reduce_parts,
)
from mkernel.backends.accelerators.cuda.gemm import tuning as library_tuning
from mkernel.backends.accelerators.cuda.schedule import (
    MOST_NORMED_COLUMNS,
    LibrarySchedule,
    PartsSchedule,
    SumSchedule,
)
from mkernel.backends.accelerators.hopper import dispatch
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.gemm import few_rows
from mkernel.backends.accelerators.hopper.gemm import fused as gemm
from mkernel.backends.accelerators.hopper.schedule import FewRowsSchedule
from mkernel.backends.contracts import scaled as contract
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.arguments import Around, Norm
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan, OpName, Scales
from mkernel.topology.cost import MailCalls

SENT = ("send_rows", "gemm_reduce")
BUILT = (
    "AllGatherSchedule", "ReduceSchedule", "FewRowsSchedule", "Product", "RowsOfSums", "RowNorm",
    "FarSlots",
)  # fmt: skip
STARTED = (
    "FewRowsCalls", "GatheredCopies", "PipelinedGather", "PipelinedReduce", "all_reduce",
    "reduce_scatter", "rendezvous", "push_rows", "all_gather_gemm", "all_gather", "sum_rows",
    "norm_rows", "push_part", "await_part", "load_parts", "send_far", "fill_outbox", "send_outbox",
    "land_far",
    "sum_parts", *SENT,
)  # fmt: skip
LEAST_ADDRESS = 1 << 20
CASES = [
    (op, path)
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
    for path in ("fused", "library")
]


class Started:
    """Stands for the native module: notes what is made of it and started."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._made, name)

        def build(*given: Any, **named: Any) -> Any:
            self.told.append((name, str(given), str(named)))
            return found(*given, **named)

        def together(*given: Any, **named: Any) -> Any:
            self.told.append((name, str(given[1:]), str(named)))
            return found(*given, **named)

        def start(*given: Any, **named: Any) -> Any:
            sizes = [one for one in given if isinstance(one, int) and one < LEAST_ADDRESS]
            self.told.append((name, *sizes, *(str(one) for one in given if type(one) in kinds)))
            return self

        kinds = (self._made.Element, self._made.Way, self._made.Engine)
        if name == "Collective":
            return together
        return build if name in BUILT else start if name in STARTED else found

    def start(self, *given: Any, **more: Any) -> None:
        """One call."""
        self.told += [("start", name) for name in more]


@pytest.fixture
def started(made: Any, monkeypatch: pytest.MonkeyPatch) -> Started:
    module = Started(made)

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        module.told.append(("mm", str(out.dtype)))

    monkeypatch.setattr(gemm, "native", lambda: module)
    monkeypatch.setattr(library, "native", lambda: module)
    monkeypatch.setattr(few_rows, "native", lambda: module)
    monkeypatch.setattr(all_reduce, "native", lambda: module)
    monkeypatch.setattr(norm, "native", lambda: module)
    monkeypatch.setattr(products, "mm", multiply)

    def scaled(a: Any, b: Any, of_a: Any, of_b: Any, out: torch.Tensor, fast: bool) -> None:
        module.told.append(("scaled_mm", tuple(a.shape), str(out.dtype), fast))

    def by_blocks(a: Any, b: Any, of_a: Any, of_b: Any, out: torch.Tensor) -> None:
        module.told.append(("block_mm", tuple(a.shape), str(out.dtype)))

    def nowhere(address: int, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    for module_of_parts in (parts_exchange, gather_parts, reduce_parts):
        monkeypatch.setattr(module_of_parts, "native", lambda: module)
    monkeypatch.setattr(parts_exchange, "bytes_at", nowhere)

    def scales(unscaled: Any, of_rows: Any, of_columns: Any, out: torch.Tensor) -> None:
        module.told.append(("scale_results", tuple(out.shape)))

    monkeypatch.setattr(products, "scaled_mm", scaled)
    monkeypatch.setattr(products, "scale_results", scales)
    monkeypatch.setattr(contract, "block_mm", by_blocks)
    return module


SIZES = {"m": 4096, "n": 512, "k": 512}


def launches(started: Started, world: WalkedWorld, usual: LaunchPlan) -> Launch:
    """What calls of a plan on rank 1 make and start, and the bytes that they need; the tensors are
    those of the usual one."""
    views: tuple[View, ...] = ("pipelined", "sequential")
    calls = [last_rank(usual, view, gathered=usual.op == "all_gather_gemm") for view in views]

    def launch(plan: LaunchPlan) -> object:
        started.told.clear()
        world.admit(plan, dict(calls[0].tensors))
        needs = world.accelerator.workspace(plan)
        for call in calls:
            made = replace(call, plan=plan)
            dispatch.executor_of(plan)(made, CONTEXT).start(made, 5)
        return [needs, *started.told]

    return launch


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize(("op", "path"), CASES)
def test_no_field_is_decoration(started: Started, op: str, path: str) -> None:
    world = gpus()
    usual = world.plan(op, SIZES, dtype="bfloat16", path=path)
    assert usual.path == path
    assert decorations(usual, launches(started, world, usual)) == []


class Streams:
    """Stands for CallOrder."""

    def fork(self, stream: int) -> int:
        return stream + 1

    def join(self, stream: int) -> None:
        return None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize("mode", ["row", "block"])
@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_no_field_of_e4m3_operands_is_decoration(
    started: Started, op: str, mode: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, order = gpus(), Streams()
    monkeypatch.setattr(CONTEXT, "order", order)
    monkeypatch.setattr(CONTEXT, "one", torch.ones(1, 1))
    around = Around(scales=Scales(mode=mode))  # type: ignore[arg-type]
    usual = world.plan(
        op, {"m": 256, "n": 1024, "k": 1024}, dtype="float8_e4m3fn", b_layout="column",
        around=around, chunk=chunk, path="library",
    )  # fmt: skip
    assert isinstance(usual.schedule, PartsSchedule if chunk else LibrarySchedule)
    assert decorations(usual, launches(started, world, usual)) == []


def with_few_rows(**more: object) -> AcceleratorCapabilities:
    """Claims of a machine whose constants have the kernel for few rows, wherever it fits."""
    claims = HopperAccelerator().capabilities()
    assert claims.constants is not None
    few = claims.constants.few_rows
    assert few is not None
    few = few.model_copy(update={"most_rows": 128, "least_columns": 1, **more})
    constants = claims.constants.model_copy(update={"few_rows": few})
    return claims.model_copy(update={"constants": constants})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("op", ["gemm_all_reduce", "gemm_reduce_scatter"])
@pytest.mark.parametrize(("m", "product"), [(8, "float32"), (128, "bfloat16")])
def test_no_field_of_few_rows_is_decoration(
    started: Started, op: OpName, m: int, product: str
) -> None:
    world = gpus(claims=with_few_rows())
    usual = world.plan(op, {"m": m, "n": 4096, "k": 2048}, dtype="bfloat16", path="fused")
    assert usual.part(FewRowsSchedule).product == product
    assert decorations(usual, launches(started, world, usual)) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("m", "tiling"), [(512, "narrow"), (1024, "wide")])
def test_no_field_of_tiles_by_mail_is_decoration(started: Started, m: int, tiling: str) -> None:
    world, shape = gpus(), {"m": m, "n": 8192, "k": 4096}
    usual = world.plan("gemm_all_reduce", shape, dtype="bfloat16", path="fused")
    assert usual.part(FewRowsSchedule).tiling == tiling
    assert decorations(usual, launches(started, world, usual)) == []


@pytest.mark.parametrize("where", ["behind", "inside"])
@pytest.mark.usefixtures("started")
def test_a_norm_takes_its_time_where_it_is_made(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows have a kernel behind, the library's rows what sums them; the path follows from it."""
    shape, world = {"m": 32, "n": 4096, "k": 2048}, gpus()
    usual = {"dtype": "bfloat16", "b_layout": "column"}
    normed = Around(norm=Norm(True, 1e-6))
    found = machine.machine().norms
    for path, at in (("fused", "behind"), ("library", "inside")):
        plain, other = (
            world.plan("gemm_all_reduce", shape, path=path, around=around, **usual).prediction
            for around in (Around(), normed)
        )
        assert plain is not None
        assert other is not None
        more = getattr(found, at).of(32 * 4096 * 2)
        assert other.pipelined_us - plain.pipelined_us == pytest.approx(more)
        assert other.compute_us - plain.compute_us == pytest.approx(more)
    costly = found.model_copy(update={where: machine.NormTime(us=100.0, rows_gbs=1e3)})
    known = library_tuning._MACHINE.model_copy(update={"norms": costly})
    monkeypatch.setattr(library_tuning, "_MACHINE", known)
    chosen = world.plan("gemm_all_reduce", shape, around=normed, **usual)
    assert chosen.path == ("library" if where == "behind" else "fused")


@pytest.mark.parametrize(
    ("m", "columns", "twice"),
    [
        (8, 2048, None),
        (16, 2048, None),
        (4096, 2048, "whole rows"),
        (1023, 8200, "rows are cut"),  # mail would not hold whole ones
    ],
)
@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_who_normalises_rows_of_the_librarys_products(
    started: Started, m: int, columns: int, twice: str | None, most_bytes: int
) -> None:
    """What takes rows by mail normalises them, in one exchange or two; else a kernel that follows."""
    claims = HopperAccelerator().capabilities()
    assert claims.constants is not None
    library_path = claims.constants.library
    assert library_path is not None
    once = MailCalls(most_bytes=most_bytes, exchange_us=3.0, egress_gbs=350.0)
    constants = claims.constants.model_copy(
        update={"library": library_path.model_copy(update={"mail": once})}
    )
    claims = claims.model_copy(update={"constants": constants})
    usual = gpus(claims=claims).plan(
        "gemm_all_reduce", {"m": m, "n": columns, "k": 512}, dtype="bfloat16", path="library",
        around=Around(norm=Norm(True, 1e-6)),
    )  # fmt: skip
    how = usual.part(LibrarySchedule)
    mailed = 0 < m * columns * 2 <= most_bytes / 2
    assert (how.way, how.by_mail) == (("two_shot", True) if twice else ("one_shot", mailed))
    inside = twice == "whole rows" if twice else mailed
    assert how.normalises == inside
    call, rows = last_rank(usual), torch.zeros(m, columns).bfloat16()
    given = {"residual": rows, "residual_out": rows.clone(), "norm_weight": rows[0].clone()}
    call = replace(call, tensors={**call.tensors, **given})
    executor = dispatch.executor_of(usual)
    executor.workspace(usual)
    executor(call, CONTEXT).start(call, 5)
    names = [name for name, *_ in started.told]
    told = [one[2] for one in started.told if one[0] == "RowsOfSums" and "norm" in one[2]]
    assert ("sum_rows" in names) == inside
    assert not inside or [f"'twice': {twice is not None}" in named for named in told] == [True]
    unrounded = f"'unrounded': {how.product == 'float32'}"
    assert not inside or [unrounded in named for named in told] == [True]
    assert ("norm_rows" in names) != inside
    if not inside:
        wrong = usual.model_copy(update={"schedule": how.model_copy(update={"normalises": True})})
        with pytest.raises(ArgumentError, match=r"plan\.schedule\.normalises"):
            executor.workspace(wrong)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("m", "n", "way", "mailed"),
    [
        (1272, 3296, "one_shot", True),
        (1024, 4096, "one_shot", True),  # 8 MiB, from each of two ranks
        (6402, 664, "two_shot", True),
        (1178, 4072, "two_shot", True),
        (2690, 2560, "two_shot", True),
        (11878, 664, "two_shot", True),
        (1526, 5440, "two_shot", True),
        (2048, 4096, "two_shot", True),  # 16 MiB
        (2049, 4096, "two_shot", False),
        (1240, 9600, "two_shot", False),
    ],
)
def test_two_exchanges_go_by_mail_where_it_holds_them(
    started: Started, m: int, n: int, way: str, mailed: bool
) -> None:
    usual = gpus().plan(
        "gemm_all_reduce", {"m": m, "n": n, "k": 256}, dtype="bfloat16", path="library"
    )
    how = usual.part(LibrarySchedule)
    assert (how.way, how.by_mail, how.normalises) == (way, mailed, False)
    executor = dispatch.executor_of(usual)
    executor.workspace(usual)
    executor(last_rank(usual), CONTEXT).start(last_rank(usual), 5)
    assert any(
        each[0] == "Collective" and str({"by_mail": mailed})[1:-1] in each[2]
        for each in started.told
    )
    assert decorations(usual, launches(started, gpus(), usual)) == []


@pytest.mark.parametrize("op", ["gemm_all_reduce", "all_reduce"])
def test_two_exchanges_by_mail_wait_for_flags_where_that_is_faster(
    started: Started, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """As constants say, which may be another machine's."""
    path = machine.machine().constants.library
    assert path is not None
    assert path.mail_twice is not None
    slow = path.mail_twice.model_copy(update={"exchanges_us": 100.0})
    for twice, mailed in ((path.mail_twice, True), (slow, False), (None, False)):
        constants = machine.machine().constants.model_copy(
            update={"library": path.model_copy(update={"mail_twice": twice})}
        )
        known = library_tuning._MACHINE.model_copy(update={"constants": constants})
        monkeypatch.setattr(library_tuning, "_MACHINE", known)
        claims = HopperAccelerator().capabilities().model_copy(update={"constants": constants})
        world = gpus(claims=claims)
        if op == "all_reduce":
            made = world.plan(op, {"m": 1178, "n": 4072}, dtype="bfloat16")
            assert made.part(SumSchedule).way == ("mail_twice" if mailed else "two_shot")
        else:
            sizes = {"m": 1178, "n": 4072, "k": 256}
            made = world.plan(op, sizes, dtype="bfloat16", path="library")
            assert made.part(LibrarySchedule).by_mail == mailed


def test_what_mail_does_not_hold_in_two_exchanges_is_refused(started: Started) -> None:
    sizes = {"m": 2049, "n": 4096}
    for op, more in (("gemm_all_reduce", {"k": 256}), ("all_reduce", {})):
        given = {"path": "library"} if more else {}
        usual = gpus().plan(op, sizes | more, dtype="bfloat16", **given)
        assert usual.schedule is not None
        change = {"by_mail": True} if more else {"way": "mail_twice"}
        wrong = usual.model_copy(update={"schedule": usual.schedule.model_copy(update=change)})
        needed = mail.of_two_exchanges(2049 * 4096, 2, "bfloat16", "bfloat16")
        assert needed == 2 * (2049 * 4096)
        error = ArgumentError if more else Unsupported
        with pytest.raises(error, match=rf"send {needed} bytes.*by mail may have 16777216"):
            dispatch.executor_of(usual).workspace(wrong)


def test_mail_of_two_exchanges_by_hand() -> None:
    """A rank gets its part from every peer and sends them its sums, in slots of 128 bytes; parts are of
    whole 8 elements."""
    assert mail.of_two_exchanges(1, 2, "float32", "bfloat16") == 128 + 128
    assert mail.of_two_exchanges(129, 2, "float32", "bfloat16") == 384 + 256  # parts of 72
    assert mail.of_two_exchanges(1000, 4, "float16", "float16") == 3 * (512 + 512)  # of 256


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("m", "way"), [(8, "mail"), (3000, "mail_twice"), (4104, "two_shot")])
def test_no_field_of_a_plain_sum_is_decoration(started: Started, m: int, way: str) -> None:
    world = gpus()
    usual = world.plan("all_reduce", {"m": m, "n": 2048}, dtype="bfloat16")
    assert usual.part(SumSchedule).way == way
    assert decorations(usual, launches(started, world, usual)) == []


@pytest.mark.parametrize("view", ["pipelined", "compute_only"])
@pytest.mark.parametrize(
    ("m", "n", "way"),
    [
        (1024, 4096, "mail"),
        (1024, 8192, "mail_twice"),  # all that a call's mail may have
        (1023, 8200, "two_shot"),  # which it would not exceed, were rows cut
        (1031, 4104, "mail_twice"),
        (160, MOST_NORMED_COLUMNS + 8, "two_shot"),  # rows that a block cannot keep
    ],
)
def test_who_normalises_rows_of_sums(
    started: Started, m: int, n: int, way: str, view: View
) -> None:
    """The kernel that takes them by mail, in one exchange or two; else one that follows."""
    world = gpus()
    plain = world.plan("all_reduce", {"m": m, "n": n}, dtype="bfloat16")
    assert plain.part(SumSchedule).way == ("mail" if way == "mail" else "mail_twice")
    around = Around(norm=Norm(True, 1e-6))
    usual = world.plan("all_reduce", {"m": m, "n": n}, dtype="bfloat16", around=around)
    assert usual.part(SumSchedule).way == way
    assert usual.prediction is not None
    assert plain.prediction is not None
    if way != "two_shot":
        more = usual.prediction.pipelined_us - plain.prediction.pipelined_us
        assert more == pytest.approx(machine.machine().norms.inside.of(m * n * 2))
    call, rows = last_rank(usual, view), torch.zeros(m, n).bfloat16()
    given = {"residual": rows, "residual_out": rows.clone(), "norm_weight": rows[0].clone()}
    call = replace(call, tensors={**call.tensors, **given})
    executor = dispatch.executor_of(usual)
    needs = executor.workspace(usual)
    executor(call, CONTEXT).start(call, 5)
    names = [name for name, *_ in started.told]
    inside = way != "two_shot"
    assert ("sum_rows" in names, "norm_rows" in names, "all_reduce" in names) == (
        inside, not inside, not inside and view != "compute_only",
    )  # fmt: skip
    told = [one[2] for one in started.told if one[0] == "RowsOfSums" and "norm" in one[2]]
    assert [f"'twice': {way == 'mail_twice'}" in named for named in told] == [inside]
    assert (needs.areas[0] > started.DATA_OFFSET) != inside  # nothing but mail


def test_a_plain_sum_too_large_for_mail_is_refused(started: Started) -> None:
    usual = gpus().plan("all_reduce", {"m": 4096, "n": 2048}, dtype="bfloat16")
    by_mail = usual.part(SumSchedule).model_copy(update={"way": "mail"})
    with pytest.raises(Unsupported, match="a call by mail may have"):
        dispatch.executor_of(usual).workspace(usual.model_copy(update={"schedule": by_mail}))


def two_nodes(
    gpudirect: bool, ranks: int = 1, accelerator: CudaAccelerator | None = None
) -> WalkedWorld:
    gpus = tuple(devices.gpu(i, name="NVIDIA H200") for i in range(ranks))
    nics = tuple(devices.nic(i, gpudirect=gpudirect) for i in range(ranks))
    nodes = [devices.node(gpus, nics) for _ in range(2)]
    return WalkedWorld(accelerator or HopperAccelerator(), devices.world(*nodes), ranks)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("gpudirect", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_no_field_is_decoration_between_nodes(
    started: Started, monkeypatch: pytest.MonkeyPatch, op: str, gpudirect: bool
) -> None:
    monkeypatch.setattr(gemm, "device_world", mapped)
    world = two_nodes(gpudirect)
    usual = world.plan(op, SIZES, dtype="bfloat16")
    assert usual.routes.staged != gpudirect
    assert bool(world.accelerator.workspace(usual).staging) != gpudirect
    assert decorations(usual, launches(started, world, usual)) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", [None, "row"])
@pytest.mark.parametrize("op", OPS)
def test_no_field_of_a_librarys_products_between_nodes_is_decoration(
    started: Started, monkeypatch: pytest.MonkeyPatch, op: str, mode: Any
) -> None:
    monkeypatch.setattr(parts_exchange, "device_world", mapped)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(CONTEXT, "order", Streams())
    monkeypatch.setattr(CONTEXT, "one", torch.ones(1, 1))
    world = two_nodes(False, accelerator=CudaAccelerator())
    more: dict[str, Any] = {"dtype": "bfloat16"}
    if mode is not None:
        around = Around(scales=Scales(mode=mode))
        more = {"dtype": "float8_e4m3fn", "b_layout": "column", "around": around}
    usual = world.plan(op, SIZES, **more)
    assert usual.part(PartsSchedule).chunks == 1
    assert decorations(usual, launches(started, world, usual)) == []


def mapped(call: Call, context: DispatchContext) -> object:
    """A world whose other nodes are not reached."""
    return native.native().DeviceWorld(WORKSPACES, call.rank % 2, context.control, 1.0, 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("exchange", ["direct", "hierarchical"])
@pytest.mark.parametrize("op", OPS)
def test_no_field_is_decoration_between_nodes_of_several_ranks(
    started: Started, monkeypatch: pytest.MonkeyPatch, op: str, exchange: str
) -> None:
    monkeypatch.setattr(gemm, "device_world", mapped)
    world = two_nodes(False, ranks=2)
    usual = world.plan(op, SIZES, dtype="bfloat16", exchange=exchange)
    assert usual.schedule is not None
    assert usual.schedule.model_dump()["exchange"] == exchange
    assert decorations(usual, launches(started, world, usual)) == []


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("sizes", "exchange"), [((2048, 1024, 1024), "hierarchical"), ((512, 131072, 262144), "direct")]
)
def test_the_exchange_is_the_one_that_is_predicted_to_be_faster(
    op: str,
    sizes: tuple[int, int, int],
    exchange: str,
    monkeypatch: pytest.MonkeyPatch,
    started: Started,
) -> None:
    m, n, k = sizes
    if exchange == "direct":  # what travels has few columns
        n, k = (n, 256) if op == "all_gather_gemm" else (256, k)
    found = two_nodes(True, ranks=2).plan(op, {"m": m, "n": n, "k": k}, dtype="bfloat16")
    assert found.schedule is not None
    assert found.schedule.model_dump()["exchange"] == exchange


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_hierarchical_is_refused_where_there_is_nothing_to_share(
    started: Started, op: str, nodes: int
) -> None:
    world = gpus() if nodes == 1 else two_nodes(True)
    usual = world.plan(op, SIZES, dtype="bfloat16", exchange="auto", path="fused")
    assert usual.schedule is not None
    other = usual.schedule.model_copy(update={"exchange": "hierarchical"})
    with pytest.raises(ArgumentError, match=r"plan\.schedule\.exchange = 'hierarchical'"):
        dispatch.executor_of(usual).workspace(usual.model_copy(update={"schedule": other}))


class Painted(LibrarySchedule):
    kind: Any = "tests.painted"  # type: ignore[mutable-override]
    colour: str = "red"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_field_that_is_decoration_is_found(started: Started) -> None:
    world = gpus()
    usual = world.plan("gemm_all_reduce", SIZES, dtype="bfloat16", path="library")
    part = Painted(**{**dict(usual.part(LibrarySchedule)), "kind": "tests.painted"})
    painted = usual.model_copy(update={"schedule": part})
    found = decorations(painted, launches(started, world, painted))
    assert found == ["schedule.colour: 'red' or 'red-other'"]


@pytest.mark.parametrize(("op", "path"), CASES)
def test_a_plan_without_its_backends_part_is_not_launched(
    started: Started, op: str, path: str
) -> None:
    usual = gpus().plan(op, SIZES, dtype="bfloat16", path=path)
    plan = usual.model_copy(update={"schedule": None})
    with pytest.raises(TypeError, match="Schedule; plan with the backend's `schedule`"):
        dispatch.executor_of(plan).workspace(plan)
