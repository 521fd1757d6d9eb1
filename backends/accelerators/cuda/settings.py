"""The settings of backends on CUDA devices, each read from ``MKERNEL_<ACCELERATOR>_<NAME>``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mkernel.settings import BackendSettings, load_as


class CudaSettings(BackendSettings):
    """The settings of accelerator cuda, which those upon it have too."""

    model_config = SettingsConfigDict(env_prefix="MKERNEL_CUDA_")

    multiprocessors: int | None = Field(
        None,
        ge=8,
        description="the most multiprocessors that kernels of a rank take; the others are left to "
        "whatever runs beside it, under CUDA's MPS other ranks of the device; None: all; products of "
        "the library path take what is free; the same on all ranks",
    )
    link_gbs: float | None = Field(
        None,
        gt=0,
        description="plan as if a link between devices of a node carried so many GB/s at most; changes "
        "plans only, transfers are as fast as they are; not where the chips have no constants; None: "
        "what links carry; the same on all ranks",
    )
    peer_access: bool = Field(
        True,
        description="0: ranks do as if no device reached another's memory: each is a node of its own, "
        "and what they exchange rests in pinned host memory; the same on all ranks",
    )
    outputs: int = Field(
        3,
        ge=0,
        description="for how many results of an AllReduce, of 4 MiB or more, a rank keeps memory that "
        "peers write without a copy; others are copied; 0: all are; the same on all ranks",
    )
    tokens: Literal["auto", "whole", "wanted"] = Field(
        "auto",
        description="how tokens of an MoE dispatch travel within a node: all of them to every rank, by "
        "copy engines, or each once to each rank that has an expert of it, by a kernel; auto: "
        "whichever is predicted to be faster; the same on all ranks",
    )


def settings_of(accelerator: str) -> CudaSettings:
    """Return the settings of that backend, ``cuda`` or one upon it, whose module has been imported."""
    every: tuple[type[CudaSettings], ...] = (CudaSettings, *CudaSettings.__subclasses__())
    prefix = f"MKERNEL_{accelerator.upper()}_"
    return load_as(next(each for each in every if each.model_config.get("env_prefix") == prefix))
