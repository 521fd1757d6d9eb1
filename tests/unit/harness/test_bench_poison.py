"""In every mode a call finds poison in the output it is given, and poison was in memory that it may
allocate its own from."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from mkernel.cases import case_of, poison
from mkernel.harness.contenders import Contender
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import Mode
from mkernel.harness.work import Replay, Unseen, Work, work

Shape = tuple[tuple[int, ...], torch.dtype]


class Looks(Contender):
    """Looks at what it is given, and returns memory of its own."""

    name = "looks"
    given: list[tuple[Shape, int]]

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.own = torch.zeros(problem.memory(self.kind)["out"][0])

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        self.given.append(((tuple(out.shape), out.dtype), out.numel() - poison.count(out)))
        out.fill_(1)
        return {"out": self.own.fill_(1)}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shape, int]]:
    """Shape and dtype of each output that a call was given, and how much of it was no poison."""
    monkeypatch.setattr(Looks, "given", [], raising=False)
    return Looks.given


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shapes and dtypes of what was poisoned until now and is free again."""
    filled: list[tuple[Shape, weakref.ref[torch.Tensor]]] = []
    fill = poison.fill

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        filled.append(((tuple(tensor.shape), tensor.dtype), weakref.ref(tensor)))
        return fill(tensor)

    monkeypatch.setattr(poison, "fill", noted)
    return lambda: [shape for shape, tensor in filled if tensor() is None]


def problem() -> Problem:
    case = case_of("gemm_all_reduce")({"m": 16, "n": 8, "k": 24}, "float32", "float32", seed=3)
    return Problem(case, 0, 1, torch.device("cpu"))


MODES: tuple[Mode, ...] = ("kernel", "eager", "first")


@pytest.mark.parametrize("mode", MODES)
def test_every_turn_begins_with_poison(
    mode: Mode, given: list[tuple[Shape, int]], freed: Any
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


def test_what_a_replay_writes_is_poisoned_before_it(given: list[tuple[Shape, int]]) -> None:
    """Also where that is memory which was allocated while the graph was captured."""
    contender = Looks(problem())
    made: Work = WithoutGraphs(contender)
    for turn in (1, 3, 5):
        made.prepare(turn)
        assert poison.count(contender.own) == contender.own.numel()
        before = len(given)
        made.run()
        assert [unpoisoned for _, unpoisoned in given[before : before + 2]] == [0, 0]
