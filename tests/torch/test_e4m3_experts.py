"""Expert-parallel layers in e4m3 are the layers of their dequantised weights, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e4m3_faults import FAULTS
from ranks import close, on_ranks, operand
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad, silu

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import ArgumentError, DtypeError
from mkernel.nn import ExpertParallel, ExpertParallelMLP

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS, TOKENS, H, EXPERTS, TOP_K = 2, 9, 384, 4, 3
EACH, MOST = EXPERTS // RANKS, RANKS * TOKENS * TOP_K
E4M3, BLOCK = torch.float8_e4m3fn, 128
PARTS = {"gate": False, "up": False, "down": True}


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def spread(scale: Tensor, n: int, k: int) -> Tensor:
    """A factor of each element from one of each block, the last of which may be cut short."""
    wide = scale.double().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return wide[..., :n, :k]


def checkpoint(inner: int, kind: str) -> dict[str, Tensor]:
    """A file's entries, expert by expert. Blocks of a weight are of unlike sizes."""
    found = {}
    for expert in range(EXPERTS):
        for part, turned in PARTS.items():
            n, k = (H, inner) if turned else (inner, H)
            scale = operand(f"{part} scale", expert, blocks(n), blocks(k)).exp() / 64
            weight, name = operand(part, expert, n, k), f"{expert}.{part}_proj.weight"
            if kind == "e4m3":
                found |= {name: weight.to(E4M3), f"{name}_scale_inv": scale}
            else:
                found[name] = (weight * spread(scale, n, k)).to(torch.bfloat16)
    return found


def together(single: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same entries as transformers' modules have them."""
    found = {}
    for suffix in ("", "_scale_inv"):
        if f"0.up_proj.weight{suffix}" not in single:
            continue
        gate, up, down = (
            torch.stack([single[f"{each}.{part}_proj.weight{suffix}"] for each in range(EXPERTS)])
            for part in PARTS
        )
        found |= {f"gate_up_proj{suffix}": torch.cat((gate, up), 1), f"down_proj{suffix}": down}
    return found


def wide(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A matrix in float64: dequantised, or as it is quantised by blocks, which is written here anew."""
    n, k = weight.shape
    if scale is None:
        most = pad(weight.float().abs(), (0, -k % BLOCK, 0, -n % BLOCK))
        most = most.view(blocks(n), BLOCK, blocks(k), BLOCK).amax((1, 3))
        scale = most / torch.tensor(448.0)
        weight = (weight.float() / spread(scale, n, k).float()).to(E4M3)
    return weight.double() * spread(scale, n, k)


def rows(x: Tensor) -> Tensor:
    """Rows in float64 as they are quantised, by blocks of 128."""
    parts = pad(x.float(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    step = parts.abs().amax(2, keepdim=True) / torch.tensor(448.0)
    step[step == 0] = 1
    found: Tensor = (parts / step).to(E4M3).double() * step.double()
    return found.flatten(1)[:, : x.shape[1]]


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=chance).topk(TOP_K).indices
    ids[rank::4, 1] = -1
    size = operand("size", rank, TOKENS, H // BLOCK).exp().repeat_interleave(BLOCK, 1)
    x = (operand("x", rank, TOKENS, H) * size).to(torch.bfloat16)
    return x, ids, operand("weights", rank, TOKENS, TOP_K)


def oracle(inner: int, kind: str, rank: int) -> Tensor:
    """The result of a rank in float64, with the roundings to e4m3 that are documented."""
    single, (x, ids, weights) = checkpoint(inner, kind), inputs(rank)
    out = torch.zeros(TOKENS, H).double()
    for expert in range(EXPERTS):
        names = [f"{expert}.{part}_proj.weight" for part in PARTS]
        gate, up, down = (wide(single[name], single.get(f"{name}_scale_inv")) for name in names)
        h = rows(silu(rows(x) @ gate.t()) * (rows(x) @ up.t()))
        out += ((ids == expert) * weights).sum(1, keepdim=True).double() * (h @ down.t())
    return out


def made(inner: int, **options: Any) -> ExpertParallelMLP:
    return ExpertParallelMLP(H, inner, EXPERTS, transposed=True, dtype=E4M3, **options)


def loaded(inner: int, kind: str, joined: bool, **options: Any) -> ExpertParallelMLP:
    single = checkpoint(inner, kind)
    layer = made(inner, **options)
    layer.load_state_dict(together(single) if joined else single)
    return layer


def layer(inner: int, kind: str, joined: bool, options: dict[str, Any]) -> None:
    rank = mkernel.world().rank
    first = loaded(inner, kind, joined, **options)
    again = made(inner, **options)
    again.load_state_dict(first.state_dict())  # of a rank's part
    for each in (first, again):
        out = each(*inputs(rank))
        assert out.dtype == torch.bfloat16
        close(out, oracle(inner, kind, rank), TOLERANCE["bfloat16"], "out")
    held = {name: each.dtype for name, each in first.state_dict().items()}
    assert held == {
        "gate_up_proj": E4M3, "gate_up_proj_scale_inv": torch.float32,
        "down_proj": E4M3, "down_proj_scale_inv": torch.float32,
    }  # fmt: skip
    for name, each in first.named_parameters():
        assert not each.requires_grad
        assert each.untyped_storage().nbytes() == each.nbytes, f"{name} keeps more than its part"


@pytest.mark.parametrize("inner", [256, 192])
@pytest.mark.parametrize("kind", ["e4m3", "bfloat16"])
@pytest.mark.parametrize(
    ("joined", "options"), [(True, {}), (False, {"capacity": MOST, "max_tokens": TOKENS + 2})]
)
def test_it_is_the_dequantised_layer(
    inner: int, kind: str, joined: bool, options: dict[str, Any]
) -> None:
    on_ranks(layer, inner, kind, joined, options, ranks=RANKS)


def swish(gate: Tensor) -> Tensor:
    return gate * gate.sigmoid()


def other_ways() -> None:
    """Apply another activation, take tokens in float16, weights of zeros, and a state dict's own
    tensors."""
    rank = mkernel.world().rank
    x, ids, weights = inputs(rank)
    usual = loaded(192, "e4m3", joined=False)
    wanted = usual(x, ids, weights)
    with torch.device("meta"):
        taken = made(192, activation=swish)
    taken.load_state_dict({
        name: each.to(torch.bfloat16).float() if "scale" in name else each
        for name, each in checkpoint(192, "e4m3").items()
    }, assign=True)  # fmt: skip
    taken.load_state_dict(usual.state_dict(), assign=True)
    close(taken(x, ids, weights), wanted.double(), 2**-5, "the activation by itself")
    half = usual(x.half(), ids, weights)
    assert half.dtype == torch.float16
    close(half, oracle(192, "e4m3", rank), TOLERANCE["bfloat16"], "out in float16")
    assert not usual(x, torch.full_like(ids, -1), weights).any()
    blank = made(192)
    blank.load_state_dict({name: torch.zeros(each.shape) for name, each in together(
        checkpoint(192, "bfloat16")).items()})  # fmt: skip
    assert not blank(x, ids, weights).any()
    empty = made(192)  # no weights were loaded
    assert torch.isnan(empty.down_proj_scale_inv).all()
    assert torch.isnan(empty(x, ids.clamp_min(0), weights)).all()


def test_other_activations_and_dtypes() -> None:
    on_ranks(other_ways, ranks=RANKS)


def narrow_scales() -> None:
    """Scales in other dtypes, which checkpoints have, are as their values in float32."""
    single = checkpoint(256, "e4m3")
    powers = {
        name: each.log2().round().exp2() if "scale" in name else each
        for name, each in single.items()
    }
    wanted = made(256)
    wanted.load_state_dict(powers)
    powers_of_two = getattr(torch, "float8_e8m0fnu", torch.bfloat16)  # from torch 2.7 on
    for dtype in (torch.bfloat16, powers_of_two):
        for assign in (False, True):
            found = made(256)
            given = {
                name: each.to(dtype) if "scale" in name else each for name, each in powers.items()
            }
            found.load_state_dict(together(given) if assign else given, assign=assign)
            kept = dict(found.named_parameters())
            for name, each in wanted.named_parameters():
                assert torch.equal(kept[name].view(torch.uint8), each.view(torch.uint8))
                assert kept[name].untyped_storage().nbytes() == each.nbytes


def test_scales_of_other_dtypes_are_taken_as_they_are() -> None:
    on_ranks(narrow_scales, ranks=RANKS)


def sixteen_bits(transposed: bool) -> None:
    """A layer in 16 bits takes single experts too, as it stores them."""
    single = checkpoint(192, "bfloat16")
    options: dict[str, Any] = {"transposed": transposed, "dtype": torch.bfloat16}
    found = ExpertParallelMLP(H, 192, EXPERTS, **options)
    found.load_state_dict(single)
    rank = mkernel.world().rank
    for name, each in together(single).items():
        part = each.chunk(RANKS)[rank]
        assert torch.equal(getattr(found, name), part if transposed else part.transpose(1, 2))


@pytest.mark.parametrize("transposed", [False, True])
def test_sixteen_bits_take_single_experts(transposed: bool) -> None:
    on_ranks(sixteen_bits, transposed, ranks=RANKS)


# ---- faults that must be seen --------------------------------------------------------------------


def off(fault: str, inner: int, kind: str) -> float:
    rank, planted = mkernel.world().rank, loaded(inner, kind, joined=False)
    with torch.no_grad():
        FAULTS[fault](planted)
    wanted = oracle(inner, kind, rank)
    return float((planted(*inputs(rank)).double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("inner", "kind"), [(256, "e4m3"), (192, "e4m3"), (192, "bfloat16")])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, inner: int, kind: str) -> None:
    for error in on_ranks(off, fault, inner, kind, ranks=RANKS):
        if fault == "none":
            assert error <= TOLERANCE["bfloat16"]
        else:
            assert error > 10 * TOLERANCE["bfloat16"]


# ---- what is refused -----------------------------------------------------------------------------


class Limited(Module):
    """Experts that limit gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 7.0
        for name, each in together(checkpoint(256, "bfloat16")).items():
            self.register_parameter(name, Parameter(each))


class Scaled(Module):
    """Experts in e4m3."""

    def __init__(self) -> None:
        super().__init__()
        for name, each in together(checkpoint(256, "e4m3")).items():
            self.register_parameter(name, Parameter(each, requires_grad=False))


def refused() -> None:
    x, ids, weights = inputs(mkernel.world().rank)
    found = loaded(256, "e4m3", joined=True)
    single, cast = checkpoint(256, "e4m3"), loaded(256, "e4m3", joined=True).to(torch.bfloat16)
    joined = together(single)
    halves, whole = checkpoint(256, "bfloat16"), together(checkpoint(256, "bfloat16"))
    without = {name: each for name, each in halves.items() if ".up" not in name}
    of_192 = together(checkpoint(192, "e4m3"))
    by_fused_blocks = of_192["gate_up_proj_scale_inv"][:, :3]
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ArgumentError, "transposed", lambda: ExpertParallelMLP(H, 256, EXPERTS, dtype=E4M3)),
        (ArgumentError, "hidden_size",
         lambda: ExpertParallelMLP(192, 256, EXPERTS, transposed=True, dtype=E4M3)),
        (ArgumentError, r"x = .*no backward with e4m3 weights",
         lambda: found(x.clone().requires_grad_(), ids, weights)),
        (ArgumentError, r"topk_weights = .*no backward with e4m3 weights",
         lambda: found(x, ids, weights.clone().requires_grad_())),
        (DtypeError, "x.dtype", lambda: found(x.float(), ids, weights)),
        (DtypeError, "w.dtype", lambda: cast(x, ids, weights)),
        (DtypeError, "gate_up_proj.dtype", lambda: found.load_state_dict({**joined, **whole})),
        (DtypeError, "down_proj.dtype", lambda: found.load_state_dict(
            {name: each.view(torch.int8) for name, each in joined.items() if name == "down_proj"})),
        (ArgumentError, r"without \d\.up_proj\.weight ", lambda: found.load_state_dict(without)),
        (RuntimeError, "Missing key.*gate_up_proj_scale_inv", lambda: found.load_state_dict(
            {name: each for name, each in single.items() if "scale" not in name})),
        (RuntimeError, "Unexpected key.*4.down_proj", lambda: found.load_state_dict(
            {**halves, "4.down_proj.weight": halves["0.down_proj.weight"]})),
        (RuntimeError, "size mismatch for gate_up_proj", lambda: found.load_state_dict(of_192)),
        (RuntimeError, "size mismatch for gate_up_proj_scale_inv", lambda: made(192).load_state_dict(
            {**of_192, "gate_up_proj_scale_inv": by_fused_blocks})),
        (RuntimeError, "size mismatch for down_proj", lambda: made(512).load_state_dict(whole)),
        (ArgumentError, "limit", lambda: ExpertParallelMLP.from_experts(Limited(), transposed=True)),
        (ArgumentError, "Scaled in e4m3",
         lambda: ExpertParallel(transposed=True)._apply(Scaled(), None)),  # type: ignore[arg-type]
    ]  # fmt: skip
    before = found(x, ids, weights)
    for error, said, call in wrong:
        with pytest.raises(error, match=said):
            call()
    with torch.no_grad():
        found.load_state_dict(joined)
        assert torch.equal(found(x.clone().requires_grad_(), ids, weights), before)


def test_what_it_does_not_take_is_refused_by_name() -> None:
    on_ranks(refused, ranks=RANKS)


def compiled() -> None:
    layer, given = loaded(192, "e4m3", joined=False, capacity=MOST), inputs(mkernel.world().rank)
    quick = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(quick(*given), layer(*given))


def test_a_compiled_layer_gives_the_same_bits() -> None:
    on_ranks(compiled, ranks=RANKS)
