"""Find which instructions, and which calls of libraries, give one output element the same bits.

    python3 bench/invariant_instructions.py [--device cpu] [result.json]

``instructions``, on an H100 or H200: what the program ``wgmma_bits`` prints (``tests/native/hopper``,
which ``make test`` builds), by dtype and operands, as classes of equal bits; ``by_place``: those whose
bits differ from place to place. ``library``: of torch's products, for fixed N and K, which numbers of
rows M give the first row the same bits (``by_rows``), and at which of them the last row, where that is
the same as the first, has others (``by_place``); whether K turned round gives others (``planted``), as
it should; and, for fixed M and K, which N give the same first columns the same bits (``by_columns``).
A minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from results_file import ROOT, laid_out, save, write

PROGRAM = ROOT / "build/native/backends/accelerators/hopper/tests/wgmma_bits"
ROWS = (1, 2, 3, 8, 15, 16, 17, 32, 33, 64, 100, 128, 129, 256, 512, 1000, 1024, 2048, 4096, 8192,
        16384, 32768, 65536)  # fmt: skip
COLUMNS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 7168, 8192, 14336)
SHAPES = ((2048, 4096), (4096, 1024), (7168, 2048), (1024, 8192))
"""N and K of products whose rows vary."""
SMALL = 16
"""Terms of an operand that do not cancel."""
FEW = 3
"""Numbers of rows and columns, of those above, that a CPU multiplies."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def classes(bits: dict[str, Any]) -> list[list[str]]:
    """Names with equal bits together, the largest class first."""
    found: dict[str, list[str]] = {}
    for name, each in bits.items():
        found.setdefault(str(each), []).append(name)
    return sorted(found.values(), key=len, reverse=True)


def digest(tensor: torch.Tensor) -> str:
    """A name of the bits of a tensor."""
    content = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:12]


def operand(
    rows: int, k: int, dtype: torch.dtype, device: str, seed: int, sign: int = 1
) -> torch.Tensor:
    """Rows of terms of many sizes. The second half of K is ``sign`` times the first but for a few small
    terms: those are what is left of an operand with 1 times one with -1."""
    made = torch.Generator(device=device).manual_seed(seed)
    found = torch.randn(rows, k, device=device, generator=made)
    found *= torch.exp2(torch.randint(-6, 3, found.shape, device=device, generator=made).float())
    left, half = slice(-SMALL, None), k // 2
    found[:, half - SMALL : half] *= 2.0**-6
    small = found[:, left] * 2.0**-6
    found[:, half:] = sign * found[:, :half]
    found[:, left] = small
    return found.to(dtype)


def turned(operand: torch.Tensor) -> torch.Tensor:
    """The same with K from its end to its begin."""
    whole = operand.view(torch.int8 if operand.element_size() == 1 else torch.int16)
    return whole.flip(1).view(operand.dtype)


def products(dtype: torch.dtype) -> dict[str, Product]:
    """Products of [M, K] and [N, K], by name."""
    if dtype == torch.float8_e4m3fn:
        return {
            f"_scaled_mm {mode}{' fast' if fast else ''}": scaled(mode, fast)
            for mode in ("tensor", "row")
            for fast in (False, True)
        }
    return {"mm": lambda a, b: torch.mm(a, b.t()), "_grouped_mm": grouped}


def grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of the first of two experts, which takes all rows but some."""
    ends = torch.tensor([len(a), len(a) + 7], dtype=torch.int32, device=a.device)
    rows = torch.cat([a, a[:1].expand(7, -1)])
    both = b.t().expand(2, -1, -1) if a.device.type == "cuda" else torch.stack([b.t(), b.t()])
    return torch._grouped_mm(rows, both, offs=ends)[: len(a)]


def scaled(mode: str, fast: bool) -> Product:
    """The product of e4m3 operands with scales of one."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        of_a, of_b = ((len(a), 1), (1, len(b))) if mode == "row" else ((1, 1), (1, 1))
        one, other = (torch.ones(shape, device=a.device) for shape in (of_a, of_b))
        return torch._scaled_mm(a, b.t(), one, other, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return multiply


def by_rows(
    multiply: Product, a: torch.Tensor, b: torch.Tensor, counts: Iterable[int]
) -> dict[str, Any]:
    """The row a[0], among M rows of ``a`` and once more as the last of them."""
    first, moved = {}, []
    for m in counts:
        rows = a[:m].clone()
        rows[-1] = a[0]
        out = multiply(rows, b)
        first[str(m)] = digest(out[0])
        if digest(out[-1]) != first[str(m)]:
            moved.append(m)
    other = digest(multiply(turned(a[:m]), turned(b))[0])
    return {"by_rows": classes(first), "by_place": moved, "planted": other != first[str(m)]}


def by_columns(
    multiply: Product, a: torch.Tensor, b: torch.Tensor, counts: Iterable[int]
) -> list[list[str]]:
    """The first columns of a product with the first N rows of ``b``."""
    counts = tuple(counts)
    return classes({str(n): digest(multiply(a, b[:n])[:, : counts[0]]) for n in counts})


def library(device: str) -> dict[str, Any]:
    """Torch's products."""
    on_gpu = device == "cuda"
    rows, columns = (ROWS, COLUMNS) if on_gpu else (ROWS[:FEW], COLUMNS[:FEW])
    shapes = SHAPES if on_gpu else ((64, 2048),)
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        told = found[str(dtype).removeprefix("torch.")] = {}
        for name, multiply in products(dtype).items():
            each = told[name] = {}
            try:
                for n, k in shapes:
                    a = operand(max(rows), k, dtype, device, 1, -1)
                    b = operand(n, k, dtype, device, 2)
                    each[f"n {n} k {k}"] = by_rows(multiply, a, b, rows)
                k = shapes[0][1]
                b = operand(max(columns), k, dtype, device, 3)
                for m in (1, 64, 512):
                    a = operand(m, k, dtype, device, 4, -1)
                    each[f"m {m} k {k}"] = {"by_columns": by_columns(multiply, a, b, columns)}
            except (RuntimeError, NotImplementedError, ValueError) as error:
                told[name] = {"refused": str(error).partition("\n")[0]}
    return found


def instructions() -> dict[str, Any]:
    """Classes of instructions, by dtype and operands."""
    done = subprocess.run([PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{PROGRAM}: {done.stderr or done.stdout}")
    found: dict[str, dict[str, dict[str, list[str]]]] = json.loads(done.stdout)
    return {
        dtype: {
            kind: {"classes": classes(bits), "by_place": [n for n, b in bits.items() if len(b) > 1]}
            for kind, bits in kinds.items()
        }
        for dtype, kinds in found.items()
    }


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("result", type=Path, nargs="?")
    options = parser.parse_args()
    figures: dict[str, Any] = {"library": library(options.device)}
    if options.device == "cuda":
        figures["instructions"] = instructions()
    if options.result is not None:
        print(save(options.result, "invariant_instructions", figures))
    elif options.device == "cuda":
        write("invariant_instructions", figures)
    else:
        print(laid_out(figures))


if __name__ == "__main__":
    main()
