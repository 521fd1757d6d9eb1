"""What contenders do in a turn by mode, drawn shapes, and the order of copies; on a CPU."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mkernel.cases import case_of, poison
from mkernel.cases.parts import Transfer
from mkernel.harness import conditions, results
from mkernel.harness import work as module
from mkernel.harness.contenders import Contender
from mkernel.harness.contenders.library import place_rows, summed_rows
from mkernel.harness.contenders.symm_mem import Copy, pull_order
from mkernel.harness.draws import MOST_ELEMENTS, MOST_PRODUCTS, drawn
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS, LOOP_CALLS, MODES, Mode, Shape
from mkernel.harness.work import Loop, OneCall, Replay, Unseen, Work, checked, clock, kept, work
from mkernel.plan.model import OpName

Memory = tuple[tuple[int, ...], torch.dtype]
OPS: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
FIRST_OF_SEED_0 = [(8100, 1464, 2112, "row"), (4690, 1856, 11176, "column")]
SHAPE = Shape(op="gemm_all_reduce", m=32, n=16, k=24)


def problem(m: int = 32) -> Problem:
    case = case_of("gemm_all_reduce")({"m": m, "n": 16, "k": 24}, "float32", "float32", seed=3)
    return Problem(case, 0, 1, torch.device("cpu"))


class Honest(Contender):
    """A world of one: the op is the product."""

    name = "honest"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.seen: list[float] = []

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        self.seen.append(float(inputs["a"][0, 0]))
        return {"out": torch.matmul(inputs["a"], inputs["b"], out=outputs["out"])}


class Predecessor(Honest):
    """Hands out the result of the call before."""

    _last: torch.Tensor | None = None

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        result = super().call(inputs, outputs)["out"].clone()
        if self._last is not None:
            outputs["out"].copy_(self._last)
        self._last = result
        return outputs


class OneMemory(Honest):
    """Returns memory of its own, the same in every call."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._own = problem.empty("op")

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return super().call(inputs, self._own)


class OneWrongRow(Honest):
    """In one call of all, one row is the one before it."""

    call_number, row, calls = 0, 1, 0

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = super().call(inputs, outputs)["out"]
        if self.calls % LOOP_CALLS == self.call_number:
            out[self.row] = out[self.row - 1].clone()
        self.calls += 1
        return {"out": out}


def errors(made: Work, turn: int) -> list[float]:
    """Return the errors of a turn's calls, from the last to the first that is checked."""
    wanted = made.prepare(turn)
    return [each["out"].error for each in checked(wanted, made.run(), sampled=True)]


def test_a_loop_alternates_inputs_and_checks_all_of_its_results() -> None:
    contender = Honest(problem())
    made = Loop(contender)
    assert len(errors(made, 7)) == LOOP_CALLS
    assert max(errors(made, 7)) < 1e-6
    assert len(contender.seen) == 2 * LOOP_CALLS
    assert contender.seen[0] == contender.seen[2] != contender.seen[1]


def test_a_loop_finds_a_call_that_hands_out_its_predecessors_result() -> None:
    assert min(errors(Loop(Predecessor(problem())), 1)) > 0.1


@pytest.mark.parametrize("rows", [96, 512])
@pytest.mark.parametrize("row", [1, 77, 95])
def test_one_wrong_row_in_one_call_of_a_loop_is_found(rows: int, row: int) -> None:
    """Whichever call and row it is, also of results that have more rows than are compared singly."""
    contender = OneWrongRow(problem(rows))
    made = Loop(contender)
    for number in range(LOOP_CALLS):
        contender.call_number, contender.row = number, row
        found = errors(made, 2 * number + 1)[::-1]
        assert found[number] > 10 * max(contender.limits().values())
        if number < LOOP_CALLS - 2:  # the last two are what the others are compared with
            assert max(found[:number] + found[number + 1 :]) < 1e-6


def test_results_that_take_too_much_memory_are_overwritten_by_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contender = Honest(problem())
    for most, found in ((10**9, LOOP_CALLS), (32 * 16 * 4 * 7, 6), (1, 2)):
        monkeypatch.setattr(module, "_KEPT_ON_CPU", most)
        assert kept(contender, LOOP_CALLS) == found
        assert len(errors(Loop(contender), 3)) == found


class Attends(Contender):
    """Attention of one rank; in one call of all a row is wrong that no sample need have."""

    name, wrong, calls = "attends", -1, 0

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        scores = inputs["q"] @ inputs["k"].transpose(2, 3) * inputs["q"].shape[-1] ** -0.5
        out = scores.softmax(3) @ inputs["v"]
        if self.calls % LOOP_CALLS == self.wrong:
            out[0, 1, 200] = out[0, 1, 201]
        self.calls += 1
        return {"out": out, "lse": scores.logsumexp(3)}


def test_a_wrong_row_of_an_op_whose_results_are_sampled_differs_from_the_other_calls() -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "sequence": 512, "head_dim": 16}
    case = case_of("ring_attention")(sizes, "float32", "float32", seed=3)
    contender = Attends(Problem(case, 0, 1, torch.device("cpu")))
    made = Loop(contender)
    limit = contender.limits()["out"]
    assert max(errors(made, 1)) < limit
    for contender.wrong in (0, 11, 16):
        found = errors(made, 3 + 2 * contender.wrong)[::-1]
        assert found[contender.wrong] > 10 * limit


def test_a_result_that_the_next_call_overwrites_is_not_checked() -> None:
    (error,) = errors(Loop(OneMemory(problem())), 1)
    assert error < 1e-6


def test_first_calls_are_of_shapes_that_nobody_saw() -> None:
    neighbour = SHAPE.model_copy(update={"m": 33})
    unseen = Unseen((each.op, each.named_sizes) for each in (SHAPE, neighbour))
    made = [work("first", kind, problem(), unseen) for kind in (Honest, OneMemory)]
    rows = []
    for turn in range(3):
        for each in made:
            (wanted,) = each.prepare(turn)
            assert len(each.run()) == 1
            rows.append(wanted.problem.case.sizes["m"])
    assert rows == [34, 35, 36, 37, 38, 39]
    assert max(errors(made[0], 9)) < 1e-6


@pytest.mark.parametrize(
    ("mode", "launches", "found"),
    [
        ("kernel", False, "hidden"),
        ("kernel", True, "counted"),
        ("eager", False, "host"),
        ("graph", True, "hidden"),
        ("first", False, "host"),
    ],
)
def test_clocks_of_modes(mode: Any, launches: bool, found: str) -> None:
    assert mode in MODES
    assert clock(mode, launches) == found


class Looks(Contender):
    """Looks at what it is given, and returns memory of its own."""

    name = "looks"
    given: list[tuple[Memory, int]]

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.own = torch.zeros(problem.memory(self.kind)["out"][0])

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        self.given.append(((tuple(out.shape), out.dtype), out.numel() - poison.count(out)))
        out.fill_(1)
        return {"out": self.own.fill_(1)}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Memory, int]]:
    """Shape and dtype of each output that a call was given, and how much of it was no poison."""
    monkeypatch.setattr(Looks, "given", [], raising=False)
    return Looks.given


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shapes and dtypes of what was poisoned until now and is free again."""
    filled: list[tuple[Memory, weakref.ref[torch.Tensor]]] = []
    fill = poison.fill

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        filled.append(((tuple(tensor.shape), tensor.dtype), weakref.ref(tensor)))
        return fill(tensor)

    monkeypatch.setattr(poison, "fill", noted)
    return lambda: [shape for shape, tensor in filled if tensor() is None]


@pytest.mark.parametrize("mode", ["kernel", "eager", "first"])
def test_every_turn_begins_with_poison(
    mode: Mode, given: list[tuple[Memory, int]], freed: Any
) -> None:
    made = work(mode, Looks, problem(), Unseen([]))
    before = 0
    for turn in range(1, 4):
        made.prepare(10 * turn)
        memory = freed()
        made.run()
        new = given[before:]
        before = len(given)
        outputs = 2 if mode == "eager" else 1  # a loop's calls alternate between two
        assert [unpoisoned for _, unpoisoned in new[:outputs]] == [0] * outputs
        assert new[0][0] in memory


class WithoutGraphs(Replay):
    """Replays by calling again."""

    def _capture(self) -> None:
        run = super(Replay, self).run

        class Graph:
            def replay(self) -> None:
                run()

        self._graph, self._results = Graph(), run()


def test_what_a_replay_writes_is_poisoned_before_it(given: list[tuple[Memory, int]]) -> None:
    """Also where that is memory which was allocated while the graph was captured."""
    contender = Looks(problem())
    made: Work = WithoutGraphs(contender)
    for turn in (1, 3, 5):
        made.prepare(turn)
        assert poison.count(contender.own) == contender.own.numel()
        before = len(given)
        made.run()
        assert [unpoisoned for _, unpoisoned in given[before : before + 2]] == [0, 0]


class SumsInPlace(Contender):
    """Rank 0 of two, as a library that sums in place: it adds rank 1's rows to what lies in ``out``."""

    name = "sums_in_place"

    def before(self, inputs: Inputs) -> None:
        of_turn = (self.problem.case.inputs(0, 2, turn)["x"] for turn in range(1, 9))
        (turn,) = (turn for turn, x in enumerate(of_turn, 1) if torch.equal(x, inputs["x"]))
        inputs["other"] = self.problem.case.inputs(1, 2, turn)["x"]

    def place(self, inputs: Inputs, outputs: Tensors) -> None:
        place_rows(self, inputs, outputs)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        summed_rows(self, inputs, outputs["out"])
        return {"out": outputs["out"].add_(inputs["other"])}


@pytest.mark.parametrize("kind", [OneCall, Loop, WithoutGraphs])
@pytest.mark.parametrize("most", [10**9, 1])
def test_rows_that_are_summed_in_place_are_placed_before_a_turn(
    kind: type[Work], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before a graph, which overwrites them while it is captured; calls that share memory for
    outputs (``most``) copy them in their own time."""
    monkeypatch.setattr(module, "_KEPT_ON_CPU", most)
    case = case_of("all_reduce")({"m": 6, "n": 16}, "float32", "float32", seed=3)
    contender = SumsInPlace(Problem(case, 0, 2, torch.device("cpu")))
    made = kind(contender)
    assert contender.shares_outputs == (most == 1 and kind is not OneCall)
    for turn in (1, 3, 5):
        assert max(errors(made, turn)) < 1e-6


@pytest.mark.parametrize("world", [2, 3, 4, 8, 13])
def test_no_two_ranks_pull_from_one_at_a_time(world: int) -> None:
    orders = [pull_order(rank, world) for rank in range(world)]
    for step in zip(*orders, strict=True):
        assert sorted(step) == list(range(world))
    for rank, order in enumerate(orders):
        assert sorted(order) == list(range(world))
        assert order[-1] == rank


@pytest.mark.parametrize("op", OPS)
def test_copies_are_pulled_in_that_order(op: str) -> None:
    world, rank = 4, 1
    case = case_of(op)({"m": 16, "n": 8, "k": 8}, "float32", "float32", seed=3)
    mine = Problem(case, rank, world, torch.device("cpu"))
    asked: list[int] = []

    class Theirs(list[torch.Tensor]):
        def __getitem__(self, peer: Any) -> Any:
            asked.append(peer)
            return super().__getitem__(peer)

    made = Copy.__new__(Copy)
    made.problem = mine
    oracle = mine.oracle("bytes")
    assert isinstance(oracle, Transfer)
    made._transfer = oracle
    made._theirs = Theirs([oracle.inputs(peer, world, 5)["x"] for peer in range(world)])
    out = made.call({}, mine.empty("bytes"))
    assert mine.compared("bytes", out, 5)["out"].error == 0
    assert list(dict.fromkeys(asked)) == list(pull_order(rank, world)) == [2, 3, 0, 1]


SIZES: dict[str, dict[str, int]] = {
    "moe_dispatch_gemm": {"tokens": 8, "hidden": 8, "features": 8, "experts": 4, "top_k": 2},
    "ring_attention": {"batch": 1, "heads": 2, "kv_heads": 1, "sequence": 64, "head_dim": 8},
}


@pytest.mark.parametrize(("op", "name", "found"), [
    ("moe_dispatch_gemm", "tokens", [9, 10]), ("ring_attention", "sequence", [68, 72]),
])  # fmt: skip
def test_first_calls_of_other_ops_have_more_rows(op: str, name: str, found: list[int]) -> None:
    made = Problem(case_of(op)(SIZES[op], "float32", "float32"), 0, 2, torch.device("cpu"))
    unseen = Unseen([])
    assert [unseen.like(made).case.sizes[name] for _ in range(2)] == found


def test_draws_of_a_seed_are_always_the_same() -> None:
    found = drawn(42, 7, OPS, 2)
    assert found == drawn(42, 7, OPS, 2)
    assert found[:10] == drawn(10, 7, OPS, 2)
    assert found != drawn(42, 8, OPS, 2)
    # Not even on another version of Python: these were drawn by 3.11.
    assert [
        (each.m, each.n, each.k, each.layout) for each in drawn(2, 0, OPS, 2)
    ] == FIRST_OF_SEED_0


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_draws_are_legal_wide_and_bounded(ranks: int) -> None:
    found = drawn(600, 1, OPS, ranks)
    assert len(found) == 600
    assert [each.op for each in found[:6]] == [*GEMMS, *GEMMS]
    for each in found:
        assert each.m % ranks == each.n % 8 == each.k % 8 == 0
        assert each.m * each.n * each.k <= MOST_PRODUCTS
        assert max(each.m * each.n, each.n * each.k, each.m * each.k) <= MOST_ELEMENTS
    assert min(each.m for each in found) < 8 + ranks
    assert max(each.m for each in found) > 16_384
    assert max(each.m for each in found) <= 32_944
    assert {each.layout for each in found} == {"row", "column"}
    for size in ("n", "k"):
        sizes = [getattr(each, size) for each in found]
        assert min(sizes) >= 256
        assert sum(value // 8 % 2 for value in sizes) > 200  # odd multiples of 8
        assert sum(value % 64 == 0 for value in sizes) > 200


def test_draws_of_few_rows_have_no_more() -> None:
    rows = [each.m for each in drawn(300, 1, OPS, 2, 1024)]
    assert min(rows) < 8
    assert 768 < max(rows) <= 1024


def test_a_page_says_what_was_compared() -> None:
    (file,) = Path("bench/results").glob("hopper_random_7_eager_h100_2.json")
    old = results.read(file)
    assert old is not None
    assert old.conditions is not None
    assert conditions._compared(old) == []
    new = old.model_copy(update={"conditions": old.conditions.model_copy(update={"whole": True})})
    (said,) = conditions._compared(new)
    assert "all rows of the last result on each set of inputs" in said
    assert "of a loop's other calls all elements" in said
    attention = old.rows[0].shape.model_copy(update={"op": "ring_attention"})
    rows = (old.rows[0].model_copy(update={"shape": attention}),)
    (said,) = conditions._compared(new.model_copy(update={"rows": rows}))
    assert "128 rows of the last result on each set" in said
