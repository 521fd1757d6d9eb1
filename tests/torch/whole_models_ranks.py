"""What rank processes of test_whole_models run: rows in which one contender cheats."""

from __future__ import annotations

import math
from typing import Any

import whole_models
from torch import Tensor, nn
from torch_group import default_group
from turns import Place

SIZE = whole_models.Size("tiny", 128, 2, 1)
OPTIONS = whole_models.Options(
    (SIZE,), ("torch", "nn"), ("eager",), 1, math.inf, "aot_eager", False, False
)
WRONG = ("communicates nothing", "forgets a gradient", "remembers", "falls back")


def _forgets(module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return result.detach() + 0 * result


class Remembers:
    """A hook: a module's result is that of the call before."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def __call__(self, module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        before, self._before = self._before, result.detach()
        return result if before is None else before + 0 * result


def planted() -> dict[str, dict[str, Any]]:
    """Return what is found of `nn` where it is another model, by what is wrong with that; and of a
    decoder's."""
    found = {}
    with default_group(cuda=False):
        place = Place(cuda=False)
        for wrong in (*WRONG, "nothing"):
            case = whole_models.Case(SIZE, ("torch", "nn", "floor"), place)
            blocks: dict[str, Any] = case.blocks
            if wrong == "communicates nothing":
                blocks["nn"] = blocks["floor"]
            elif wrong == "falls back":
                blocks["nn"] = blocks["torch"]
            elif wrong == "remembers":
                blocks["nn"][0].mlp.register_forward_hook(Remembers())
            elif wrong == "forgets a gradient":
                blocks["nn"][0].mlp_norm.register_forward_hook(_forgets)
            found[wrong] = whole_models.of_one_row(case, "step", OPTIONS)["nn eager"]
        decoder = whole_models.Case(whole_models.Size("tiny", 8, 1, 1), ("torch", "nn"), place)
        found["decoder"] = whole_models.of_one_row(decoder, "decode", OPTIONS)["nn eager"]
    return found
