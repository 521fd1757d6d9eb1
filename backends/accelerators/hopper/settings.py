"""The backend's own settings, each read from ``MKERNEL_HOPPER_<NAME>``."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mkernel.settings import BackendSettings


class HopperSettings(BackendSettings):
    """Of accelerator hopper."""

    model_config = SettingsConfigDict(env_prefix="MKERNEL_HOPPER_")

    multiprocessors: int | None = Field(
        None,
        ge=8,
        description="the most multiprocessors that kernels of a rank take; the others are left to "
        "whatever runs beside it, under CUDA's MPS other ranks of the device; None: all; products of "
        "the library path take what is free; the same on all ranks",
    )
