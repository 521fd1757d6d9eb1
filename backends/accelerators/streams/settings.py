"""The backend's own settings, each read from ``MKERNEL_STREAMS_<NAME>``."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mkernel.settings import BackendSettings


class StreamsSettings(BackendSettings):
    """The settings of accelerator streams."""

    model_config = SettingsConfigDict(env_prefix="MKERNEL_STREAMS_")

    device: str | None = Field(
        None,
        description="of accelerator streams: cpu, cuda or npu; None: npu or cuda where there is one",
    )
    copies: bool = Field(
        True,
        description="accelerator streams on cuda: inside a node copy engines move what GEMM ops "
        "exchange, into memory that peers map; false: torch.distributed does; the same on all ranks",
    )
