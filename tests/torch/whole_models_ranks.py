"""What rank processes of test_whole_models run: rows in which one contender cheats."""

from __future__ import annotations

import math
from typing import Any

import whole_models
from torch import Tensor, nn

SIZE = whole_models.Size("tiny", 128, 2, 1)
OPTIONS = whole_models.Options(
    (SIZE,), ("torch", "nn"), ("eager",), 1, math.inf, "aot_eager", False, False, False
)


def _forgets(module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return result.detach() + 0 * result


def planted() -> dict[str, dict[str, Any]]:
    """Return what is found of `nn` where it is another model, by what is wrong with that; and of a
    decoder's."""
    found = {}
    with whole_models.default_group(cuda=False):
        place = whole_models.Place(cuda=False)
        for wrong in ("communicates nothing", "forgets a gradient", "falls back", "nothing"):
            case = whole_models.Case(SIZE, ("torch", "nn", "floor"), place)
            blocks: dict[str, Any] = case.blocks
            if wrong == "communicates nothing":
                blocks["nn"] = blocks["floor"]
            elif wrong == "falls back":
                blocks["nn"] = blocks["torch"]
            elif wrong == "forgets a gradient":
                blocks["nn"][0].mlp_norm.register_forward_hook(_forgets)
            found[wrong] = whole_models.of_one_row(case, "step", OPTIONS)["nn eager"]
        decoder = whole_models.Case(whole_models.Size("tiny", 8, 1, 1), ("torch", "nn"), place)
        found["decoder"] = whole_models.of_one_row(decoder, "decode", OPTIONS)["nn eager"]
    return found
