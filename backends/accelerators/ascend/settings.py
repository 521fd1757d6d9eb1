"""The backend's own settings, each read from ``MKERNEL_ASCEND_<NAME>``."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from mkernel.settings import BackendSettings


class AscendSettings(BackendSettings):
    """The settings of accelerator ascend."""

    model_config = SettingsConfigDict(env_prefix="MKERNEL_ASCEND_")

    machine: str = Field(
        "a3",
        description="the simulated chip, for plans and modelled times: a3, a2-24, a2-20, or a machine "
        "description's file; the same on all ranks",
    )
    tile_m: int | None = Field(
        None, ge=16, le=256, multiple_of=16, description="rows of an output tile of the GEMM ops"
    )
    tile_n: int | None = Field(
        None, ge=32, le=512, multiple_of=32, description="its columns; the same on all ranks"
    )
    tile_k: int | None = Field(
        None, ge=16, le=1024, multiple_of=16, description="K of what is loaded at once for it"
    )
    cube_cores: int | None = Field(
        None, ge=1, description="cube cores that compute a GEMM op, at most the chip's"
    )
    comm_cores: int | None = Field(
        None, ge=1, description="vector cores that communicate for it, at most the chip's"
    )
    most_chunks: int = Field(
        256, ge=1, description="chunks a rank (an owner) that plans of GEMM ops stay within"
    )
    strict: bool = Field(
        False,
        description="accelerator ascend: simulated pipes are ordered by flags and fences only; "
        "what these leave unordered, uninitialised or waiting in vain is an error",
    )
    races: str | None = Field(
        None,
        description="with ascend_strict, in worlds of one node: a folder that exists, where each rank "
        "leaves what races between ranks are found in afterwards",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 64,
        description="with ascend_strict: instructions take effect late, in an order drawn from this "
        "among those that are legal; None: when they are issued",
    )
