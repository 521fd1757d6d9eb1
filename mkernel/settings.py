"""All settings, in one documented model; each is also read from ``MKERNEL_<NAME>``.

``mkernel doctor --settings`` prints them with their values and origins.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from mkernel.errors import ArgumentError
from mkernel.installed import points
from mkernel.log import Level
from mkernel.topology.model import MAX_NODES
from mkernel.topology.placement import NOT_PINNED, Pinning

MASK = "********"

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.01, 604800.0
_TIMEOUTS = "from 0.01 to 604800 (a week)"
MAX_LAUNCHED = 1024
"""The most ranks that one machine starts."""
AUTO = "auto"
"""The value of accelerator, nic or verbs that means: chosen by what the machine has
(:mod:`mkernel.selection`)."""


class NicSettings(BaseModel):
    """Settings of NIC sessions. Times follow the InfiniBand encoding where noted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fifo_slots: int = Field(
        8192, ge=2, le=1 << 20, description="command FIFO length; rounded up to a power of 2"
    )
    rails: int | None = Field(
        None,
        ge=1,
        le=8,
        description="devices a rank uses; None: all alike that are nearest to it; the same on all "
        "ranks, as are qps and stripe_bytes",
    )
    qps: int = Field(1, ge=1, le=8, description="queue pairs (QPs) per peer and rail")
    stripe_bytes: int = Field(
        1 << 18,
        ge=1,
        le=1 << 40,
        description="a put of so many bytes is spread over all rails and QPs",
    )
    queue_depth: int = Field(128, ge=4, le=8192, description="send work requests in flight per QP")
    receive_depth: int = Field(
        4096, ge=4, le=8192, description="receives posted per QP; a sender never runs ahead of them"
    )
    qp_timeout: int = Field(14, ge=1, le=31, description="time-out a try is 4.096 us * 2^this")
    retry_count: int = Field(6, ge=0, le=7, description="tries before RETRY_EXC_ERR")
    rnr_retry: int = Field(
        6, ge=0, le=6, description="receiver-not-ready tries; 7 (for ever) is refused"
    )
    traffic_class: int = Field(0, ge=0, le=255, description="of RC packets that are routed (RoCE)")
    service_level: int = Field(0, ge=0, le=15, description="of RC packets")
    gid_index: int | None = Field(
        None, ge=0, le=255, description="GID table index; None picks by type"
    )
    gpudirect: bool | None = Field(
        None,
        description="whether NICs read and write accelerators' memory; 0: what kernels send rests in "
        "pinned host memory; None: as real NICs say, or where they are; emulated ones do not; the "
        "same on all ranks",
    )
    soft_library: str | None = Field(None, description="path of the software provider's library")
    system_library: str = Field("libibverbs.so.1", description="name or path of the system's verbs")


PLANNED_SETTINGS = {"rails", "qps", "stripe_bytes", "gpudirect"}
"""Settings of NICs on which plans depend; the same on all ranks."""


class Settings(BaseSettings):
    """mkernel's settings. Precedence: argument, environment, default."""

    model_config = SettingsConfigDict(
        env_prefix="MKERNEL_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    timeout_s: float = Field(
        30.0,
        ge=MIN_TIMEOUT_S,
        le=MAX_TIMEOUT_S,
        description=f"deadline of every wait, in seconds: {_TIMEOUTS}",
    )
    join_timeout_s: float = Field(
        300.0,
        ge=MIN_TIMEOUT_S,
        le=MAX_TIMEOUT_S,
        description="how long a rank takes at most to join a world, in seconds; waits for ranks that "
        "the store has seen end by timeout_s too",
    )
    heartbeat_s: float = Field(
        0.2, ge=0.001, le=3600, description="how often a rank reports that it lives, in seconds"
    )
    nodes: int | None = Field(
        None, ge=1, le=MAX_NODES, description="emulated nodes under torchrun; None: real hosts"
    )
    accelerator: str = Field(
        AUTO,
        description="accelerator backend, or several in order with commas between: an op runs on the "
        "first that has it; auto: the most preferred that can run such a world on the devices that "
        "are here, and those that have ops it lacks; simulators by name only; the same on all ranks",
    )
    path: Literal["auto", "fused", "library"] = Field(
        "auto",
        description="of GEMM ops: fused kernels (not for sums of a few elements), a library's product "
        "and a collective, or what is predicted to be faster; the same on all ranks",
    )
    exchange: Literal["auto", "direct", "hierarchical"] = Field(
        "auto",
        description="between nodes of several ranks: direct, by the NIC for each pair of ranks; "
        "hierarchical, once a node and then over its fabric, of ops that the accelerator runs so; or "
        "what is predicted to be faster; the same on all ranks",
    )
    invariant: bool = Field(
        False,
        description="promise invariant results of all ops: a row's bits depend on that row and the "
        "weights alone; ops that an accelerator does not promise this of are refused; the same on all "
        "ranks, as are the next two",
    )
    invariant_segments: int = Field(
        8,
        description="parts into which invariant results cut a sum over K, whatever the number of "
        "ranks: a power of two that the number of ranks divides",
    )
    invariant_partial_dtype: Literal["float16", "bfloat16", "float32"] | None = Field(
        None,
        description="dtype to which sums of such parts are rounded; None: that of the result",
    )
    ranks_per_cpu: int = Field(
        8,
        ge=1,
        le=MAX_LAUNCHED,
        description="the most ranks that `launch` and the commands start for each CPU that they may "
        f"use; 16 ranks may always be started, more than {MAX_LAUNCHED} never",
    )
    ranks_per_device: int = Field(
        1,
        ge=1,
        le=MAX_LAUNCHED,
        description="ranks that share an accelerator where a node has more ranks than devices: for "
        "tests, since they take turns there and times say nothing; the same on all ranks",
    )
    nic: str = Field(
        AUTO,
        description="NIC backend between nodes; auto: the one that drives the machine's rails, or "
        "a software device where there are none; the same on all ranks",
    )
    verbs: str = Field(
        AUTO,
        description="verbs provider: soft, system, or a library's path; auto: system where the NIC "
        "backend finds a device that is up, else soft, which joins processes of one host only",
    )
    job_secret: SecretStr = Field(
        SecretStr(""),
        description="what the job's messages are signed and encrypted with, 16 characters at least "
        "(`openssl rand -hex 32`), the same on all ranks; needed on several hosts, since on one host "
        "the ranks make one themselves",
    )
    allow_unsigned: bool = Field(
        False,
        description="run on several hosts without a job secret: whoever reaches the store's port can "
        "then steer the job; the same on all ranks",
    )
    constants: Path | None = Field(
        None,
        description="the machine's measured constants, a file of `mkernel probe --measure`, for "
        "predictions; the same on all ranks; None: the shipped ones of the accelerator",
    )
    plans: Path | None = Field(
        None,
        description="plans and calls that `mkernel.warm(..., save=FILE)` wrote: `init` makes the "
        "process's default world know these calls, or refuses a file that was made for another world; "
        "the same file on all ranks; None: a call becomes known when it is first made",
    )
    pinning: Pinning = Field(
        NOT_PINNED,
        description="accelerators of local ranks, NICs of accelerators, where not the planner's "
        "choice; JSON, the same on all ranks",
    )
    log: Level | None = Field(
        None,
        description="show mkernel's log on stderr, from this level on: debug (memory, too), info "
        "(worlds, plans, fallbacks, failures) or warning; None: as the program configures `logging`",
    )
    nic_settings: NicSettings = Field(default_factory=NicSettings)


class BackendSettings(BaseSettings):
    """Settings that an accelerator backend adds. A subclass states in its ``model_config`` which
    variables it reads: ``env_prefix="MKERNEL_<NAME>_"``, where ``<NAME>`` is the backend's. Nothing
    else determines its values: while these variables stay, :func:`load_as` returns the same object."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")


_AnySettings = TypeVar("_AnySettings", bound=BaseSettings)

PREFIX = "MKERNEL_"
_NOT_SETTINGS = ("MKERNEL_SOFTVERBS_", "MKERNEL_PLANTED_MISTAKE", "MKERNEL_COMMIT")
"""Prefixes of variables that others read: the software RDMA device, which refuses those that it
does not know, and scripts."""


def load() -> Settings:
    """Load the settings from the environment.

    A variable that resembles a setting is taken for a misspelt one and refused; any other
    ``MKERNEL_`` variable may belong to another program and is named in a warning. Variables of
    backends (``MKERNEL_<NAME>_``) are checked against the backends' models, in :func:`load_as`.

    Raises:
        ArgumentError: names the variable that is misspelt or has an illegal value.
    """
    return load_as(Settings)


def load_as(model: type[_AnySettings]) -> _AnySettings:
    """Load the settings of a model from the environment; ArgumentError as :func:`load`."""
    prefix = str(model.model_config["env_prefix"])
    names = [name for name in os.environ if name.upper().startswith(prefix)]
    given = tuple((name, os.environ[name]) for name in names)
    if given:
        _look_for_misspelt(model, prefix, names)
    try:
        return cast("_AnySettings", _read(model, given))
    except (SettingsError, RecursionError) as error:
        named = re.search(
            r'field "(\w+)"', str(error)
        )  # too deep JSON names none: it is the longest
        longest, _ = max(given, key=lambda each: len(each[1]), default=(prefix, ""))
        setting = prefix + named[1].upper() if named else longest
        raise ArgumentError(setting, "(set)", "JSON", why="it does not parse") from None
    except ValidationError as error:
        first = error.errors(include_input=True)[0]
        path = tuple(str(part) for part in first["loc"])
        shown = MASK if path[:1] == ("job_secret",) else repr(first.get("input"))[:80]
        raise ArgumentError(
            variable(path, prefix),
            shown,
            "what `mkernel doctor --settings` documents",
            why=first["msg"],
        ) from None


@lru_cache(maxsize=64)  # a rank calls it dozens of times as it joins a world, 2 ms each
def _read(model: type[BaseSettings], given: tuple[tuple[str, str], ...]) -> BaseSettings:
    """Read a model. ``given``: the variables that it reads. The object is frozen, so that all may
    share it."""
    return model()


def check_timeout(argument: str, seconds: float) -> None:
    """Raise ArgumentError if a deadline is not one that a world can have."""
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:  # neither is NaN
        raise ArgumentError(argument, seconds, f"a number of seconds {_TIMEOUTS}")


def variable(path: tuple[str, ...], prefix: str = PREFIX) -> str:
    """Return the environment variable of a setting: ``("nic_settings", "queue_depth")`` →
    ``MKERNEL_NIC_SETTINGS__QUEUE_DEPTH``."""
    return prefix + "__".join(path).upper()


def _variables(
    model: type[BaseModel], path: tuple[str, ...] = (), prefix: str = PREFIX
) -> Iterator[str]:
    """Yield the variables of a model's fields and, for a group, of the group as one JSON value."""
    for name, field in model.model_fields.items():
        yield variable((*path, name), prefix)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _variables(field.annotation, (*path, name), prefix)


@cache
def _known(model: type[BaseSettings], prefix: str) -> frozenset[str]:
    """Return the names of a model's variables without ``MKERNEL_``."""
    return frozenset(name.removeprefix(PREFIX) for name in _variables(model, prefix=prefix))


def _look_for_misspelt(model: type[BaseSettings], prefix: str, names: Iterable[str]) -> None:
    known = _known(model, prefix)
    others = _NOT_SETTINGS if prefix != PREFIX else (*_NOT_SETTINGS, *_of_backends())
    for given in names:
        upper = given.upper()
        name = upper.removeprefix(PREFIX)
        if name in known or upper.startswith(others):
            continue
        meant = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if meant:
            raise ArgumentError(given, "(set)", f"{PREFIX}{meant[0]}", why="no such setting")
        warnings.warn(
            f"{given} is set, but mkernel has no such setting; `mkernel doctor --settings` lists "
            "those that it has",
            stacklevel=1,
        )


def _of_backends() -> tuple[str, ...]:
    """Return prefixes of the variables that installed accelerator backends may read."""
    return tuple(f"{PREFIX}{point.name.upper()}_" for point in points("mkernel.accelerators"))
