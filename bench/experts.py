"""The widths of the layers of experts that benchmarks time."""

from __future__ import annotations

from typing import NamedTuple


class Width(NamedTuple):
    """Hidden and inner features of a layer, its experts on all ranks, and how many a token has."""

    hidden: int
    features: int
    experts: int
    top_k: int


WIDTHS = {
    "deepseek": Width(7168, 2048, 256, 8),  # DeepSeek-V3
    "qwen": Width(4096, 1536, 128, 8),  # Qwen3-235B-A22B
    "tiny": Width(256, 128, 8, 2),
}
