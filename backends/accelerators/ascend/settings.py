"""The backend's own settings, each read from ``MKERNEL_ASCEND_<NAME>``."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mkernel.settings import BackendSettings


class AscendSettings(BackendSettings):
    """Of accelerator ascend."""

    model_config = SettingsConfigDict(env_prefix="MKERNEL_ASCEND_")

    strict: bool = Field(
        False,
        description="accelerator ascend: simulated pipes are ordered by flags and barriers only; "
        "what these leave unordered, uninitialised or waiting in vain is an error",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 64,
        description="with ascend_strict: instructions take effect late, in an order drawn from this "
        "among those that are legal; None: when they are issued",
    )
