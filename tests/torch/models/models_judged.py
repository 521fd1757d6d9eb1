"""The judge of parallel models: the same model, unsharded, in float64.

A parallel model multiplies in float32 and adds in another order than one that is unsharded. How far
that may take results is measured, not chosen: an unsharded float32 model's own distance from float64
is the unit, and ``SLACK`` of it is allowed.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mkernel

SLACK = 4.0
"""Sums of as many terms in another order differ by no more than this from each other, in the unit
above; a shard at another rank, or a gradient of one rank alone, by thousands."""


@dataclass
class Found:
    """What a way of running a model gives: distances from float64, and the calls of ops in a step, as
    the world counts them and as torch.profiler names them."""

    errors: dict[str, float]
    allowed: float
    calls: dict[str, int]
    profiled: dict[str, int]

    @property
    def wrong(self) -> dict[str, float]:
        return {name: each for name, each in self.errors.items() if not each <= self.allowed}


class Judge:
    """An unsharded model's logits and gradients of a batch."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self._true = _step(copy.deepcopy(model).double(), tokens, {})
        single = _step(copy.deepcopy(model), tokens, {})
        self.allowed = SLACK * max(_errors(single, self._true).values())

    def found(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        shards: dict[str, Any],
        part: slice = slice(None),
        *,
        profile: bool = False,
    ) -> Found:
        """Run a training step of ``model`` with a part of the batch, and compare it. ``shards``: the
        placements of its parameters. ``profile``: names of ops are asked for, which costs most of a
        small step."""
        placed = {name: (mesh, each) for name, each in shards.items()}
        with counted(mesh) as calls, profiled(profile) as names:
            step = _step(model, self.tokens[part], placed)
        true = {**self._true, "logits": self._true["logits"][part]}
        if isinstance(
            model, DistributedDataParallel
        ):  # its parameters are parts; torch cannot know
            del true["norm of all gradients"]
        return Found(_errors(step, true), self.allowed, dict(calls), dict(names))


def shards_of(model: nn.Module) -> dict[str, Any]:
    """Return the placements of parameters that are DTensors."""
    return {
        name: each.placements
        for name, each in model.named_parameters()
        if isinstance(each, DTensor)
    }


def _step(model: nn.Module, tokens: Tensor, shards: dict[str, Any]) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())  # torch's DDP puts others in their place
    logits = model(tokens)
    logits = _whole(getattr(logits, "logits", logits))
    labels = tokens.roll(-1, 1).flatten()
    nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()  # type: ignore[no-untyped-call]
    found = {"logits": logits.detach()}
    for given, each in parameters.items():
        name = _plain_name(given)
        gradient = each.grad
        assert gradient is not None, name
        if name in shards and not isinstance(gradient, DTensor):  # DDP takes parameters apart
            gradient = DTensor.from_local(gradient, *shards[name], run_check=False)
        found[name] = _whole(gradient)
    if not isinstance(model, DistributedDataParallel):
        norm = nn.utils.clip_grad_norm_(parameters.values(), float("inf"))
        found["norm of all gradients"] = _whole(norm)
    return found


def _plain_name(name: str) -> str:
    """Return a parameter's name in the model before wrappers were put around its modules."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(wrapper, "")
    return name


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == true.keys(), found.keys() ^ true.keys()
    return {
        name: float((found[name].double() - each).norm() / each.norm().clamp_min(1e-30))
        for name, each in true.items()
    }


@contextmanager
def counted(mesh: DeviceMesh) -> Iterator[Counter[str]]:
    """Count the calls of a world's ops, as its statistics have them."""
    before = Counter(mkernel.stats(mesh).calls)
    found: Counter[str] = Counter()
    yield found
    found.update(Counter(mkernel.stats(mesh).calls) - before)


@contextmanager
def profiled(profile: bool) -> Iterator[Counter[str]]:
    """Count the ops of this package by the names that torch.profiler shows, if it is to run."""
    found: Counter[str] = Counter()
    if not profile:
        yield found
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as run:
        yield found
    for each in run.key_averages():
        if named := re.fullmatch(r"mkernel(?:::|\.)(\w+)", each.key):
            found[named[1]] += each.count
