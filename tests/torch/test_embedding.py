"""An embedding whose rows ranks share has the results and the gradients of the whole one."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn import Embedding

import mkernel
from mkernel.errors import ArgumentError
from mkernel.nn import VocabParallelEmbedding

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 3
TOKENS, WIDTH = 12, 10


def looked_up(shape: tuple[int, ...], compiled: bool) -> None:
    torch.manual_seed(3)
    whole = Embedding(TOKENS, WIDTH)
    ids = torch.randint(TOKENS, shape)
    scale = torch.randn(*shape, WIDTH)
    part = VocabParallelEmbedding.from_embedding(whole)
    run = torch.compile(part, backend="aot_eager", fullgraph=True) if compiled else part
    found: Tensor = run(ids)
    assert torch.equal(found, whole(ids))
    (found * scale).sum().backward()
    (whole(ids) * scale).sum().backward()
    assert whole.weight.grad is not None
    mine = whole.weight.grad.chunk(RANKS)[mkernel.world().rank]
    assert torch.allclose(part.weight.grad, mine, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(7,), (2, 5)], ids=str)
def test_lookups(shape: tuple[int, ...], compiled: bool) -> None:
    on_ranks(looked_up, shape, compiled, ranks=RANKS)


def padded() -> None:
    """The gradient of the padding row is zero, on the rank that has it and after a state dict."""
    torch.manual_seed(4)
    for index in (0, 7, -1):
        whole = Embedding(TOKENS, WIDTH, padding_idx=index)
        part = VocabParallelEmbedding.from_embedding(whole)
        ids = torch.tensor([*range(TOKENS), index % TOKENS, -1 % TOKENS])
        found: Tensor = part(ids)
        assert torch.equal(found, whole(ids))
        found.sum().backward()
        whole(ids).sum().backward()
        assert whole.weight.grad is not None
        assert torch.equal(part.weight.grad, whole.weight.grad.chunk(RANKS)[mkernel.world().rank])
        fresh = VocabParallelEmbedding(TOKENS, WIDTH, padding_idx=index)
        rows = [mkernel.world().rank * len(fresh.weight) + row for row in range(len(fresh.weight))]
        zeros = [row for row, vector in zip(rows, fresh.weight, strict=True) if not vector.any()]
        assert zeros == [row for row in rows if row == index % TOKENS]
        assert f"padding_idx={index % TOKENS}" in repr(part)
    for given, name in (
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"sparse": True}, "sparse"),
    ):
        with pytest.raises(ArgumentError, match=name):
            VocabParallelEmbedding.from_embedding(Embedding(TOKENS, WIDTH, **given))
    with pytest.raises(ArgumentError, match="padding_idx = 12"):
        VocabParallelEmbedding(TOKENS, WIDTH, padding_idx=TOKENS)


def test_the_padding_row_gets_no_gradient() -> None:
    on_ranks(padded, ranks=RANKS)


def stored() -> None:
    whole = Embedding(TOKENS, WIDTH)
    part = VocabParallelEmbedding(TOKENS, WIDTH)
    part.load_state_dict(whole.state_dict())
    again = VocabParallelEmbedding(TOKENS, WIDTH)
    again.load_state_dict(part.state_dict())
    assert torch.equal(again.weight, whole.weight.chunk(RANKS)[mkernel.world().rank])
    with pytest.raises(RuntimeError, match="size mismatch"):
        part.load_state_dict({"weight": torch.zeros(TOKENS + 1, WIDTH)})
    with pytest.raises(ArgumentError, match="num_embeddings = 13"):
        VocabParallelEmbedding(TOKENS + 1, WIDTH)
    assert not part(torch.tensor([-1, TOKENS])).any()


def test_state_dicts_of_the_whole_and_of_a_part() -> None:
    on_ranks(stored, ranks=RANKS)
