"""Ring attention on `hopper`, beside ``test_calls_on_gpus``: large and refused sizes, packed
documents, a million positions, gradients; faults are seen."""

from __future__ import annotations

import random
from typing import Any

import attention_ranks
import calls
import pytest
from attention_ranks import FAULTS, Attention, Trained
from device_buffers import needs_gpus, pair, several, worlds
from families import drawn_gradients
from in_world import TOLD_S
from kept_ranks import none_failed, right

import mkernel
from mkernel.errors import ShapeError

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

both = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def launched(world: int, fn: Any, *arguments: Any, accelerator: str = "hopper") -> list[Any]:
    """What ranks of a world of their own find."""
    return mkernel.launch(
        fn, *arguments, ranks_per_node=world, accelerator=accelerator, timeout_s=TOLD_S
    )


@worlds
def test_large(world: int) -> None:
    shapes = [Attention(1, 8, 2, 4096, causal=causal) for causal in (False, True)]
    right(world, calls.judged, shapes, 1)


FAULTY: dict[str, tuple[Any, ...]] = {
    "parts": (Attention(1, 4, 2, 128, causal=True),),
    "documents": (Attention(1, 4, 2, 128, causal=True, documents=(0, 16, 40, 100, 256)),),
    "kernel": (Attention(1, 4, 2, 512, causal=True, way="kernel"),),
    "pieces": (Attention(1, 4, 2, 2048),),
    "gradients": (Trained(Attention(1, 4, 2, 128, causal=True)),),
}


@pair
@pytest.mark.parametrize("way", FAULTY)
def test_faults_are_seen(way: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank; of pieces, what one sends shows on the other."""
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "kernel" if way == "kernel" else "auto")
    what = FAULTS[way], attention_ranks.planted
    if way == "pieces":
        shapes, fn = FAULTY[way], calls.faulty
        found = launched(world, attention_ranks.in_pieces, shapes, fn, *what)
        found = [set().union(*found)]
    else:
        found = launched(world, calls.faulty, FAULTY[way], *what)
    assert [set(each) for each in found] == [set(FAULTS[way])] * len(found)


@pair
def test_sizes_that_are_refused(world: int) -> None:
    for shape in (Attention(1, 2, 2, 48, causal=True), Attention(1, 2, 2, 40)):
        with pytest.raises(ShapeError, match="nearest"):
            launched(world, calls.judged, [shape], 0)


@several
def test_documents_that_begin_elsewhere_in_every_replay(world: int) -> None:
    shape = Attention(2, 4, 2, 256, causal=True, documents=(0, 7, 200, 201, 256 * world))
    right(world, attention_ranks.other_boundaries, shape, 10)


@pytest.mark.alone
@pair
@both
def test_a_million_positions_in_a_gibibyte(world: int, causal: bool) -> None:
    for found in launched(world, attention_ranks.a_million, causal):
        print(found)
        assert found["taken"] <= 1 << 30, found
        assert all(found["errors"][name] <= limit for name, limit in found["limits"].items()), found


@several
def test_gradients_in_lots_of_heads(world: int) -> None:
    chance = random.Random(world)
    shapes = [drawn_gradients(chance, world).shape for _ in range(16)]
    shapes.append(Attention(2, 6, 3, 96, width=64, causal=True, lies="positions"))
    none_failed(launched(world, attention_ranks.trained_in_lots, shapes, 1))


@several
def test_gradients_of_the_log_sum_exp(world: int) -> None:
    shapes = [
        Trained(Attention(2, 4, 2, 128, width, causal, dtype, lies), of_sums=True)
        for causal in (False, True)
        for width, dtype, lies in (
            (128, "bfloat16", "heads"), (64, "float16", "positions"), (64, "bfloat16", "heads"),
        )
    ]  # fmt: skip
    right(world, calls.judged, shapes, 1)


@needs_gpus(2)
def test_widths_that_it_does_not_take_run_on_the_companion() -> None:
    found = launched(2, attention_ranks.runs_on, (64, 32, 128), accelerator="hopper,streams")
    assert found == [["hopper", "streams", "hopper"]] * 2
