"""The backend's own settings, each read from ``MKERNEL_HOPPER_<NAME>``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mkernel.backends.accelerators.cuda.settings import CudaSettings


class HopperSettings(CudaSettings):
    """The settings of accelerator hopper."""

    model_config = SettingsConfigDict(env_prefix="MKERNEL_HOPPER_")

    attention: Literal["auto", "parts", "kernel"] = Field(
        "auto",
        description="how ring attention runs: by calls on parts, or by one kernel where there is one "
        "for the sizes; auto: whichever is predicted to be faster; the same on all ranks",
    )
