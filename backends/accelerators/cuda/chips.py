"""Products with CUDA chips, whichever backend runs on them, from ``chips.json`` beside this file.

Constants were fitted on one card. Another one, which was never measured, is taken to reach the same
share of its nominal figures: each constant is multiplied by the ratio of the two cards' figures that
bound it (:meth:`Card.ratios`). What is not listed there, such as every latency and what one block
moves, stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from mkernel.topology.cost import MachineConstants
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Model

FILE = Path(__file__).with_name("chips.json")


class Nominal(Model):
    """Figures of a data sheet: dense products of a device, its memory, and what its links carry to
    all peers together in one direction."""

    bfloat16_tflops: float = Field(gt=0)
    float8_tflops: float | None = Field(gt=0, description="None: it has no products of e4m3")
    float32_tflops: float = Field(gt=0)
    memory_gbs: float = Field(gt=0)
    link_gbs: float = Field(gt=0)


class Card(Sourced):
    """One product. ``products``: words of the names of devices that are such a card. ``rates``: those
    machine constants that belong to the card itself, by name, where they were measured; empty:
    never."""

    products: tuple[str, ...] = Field(min_length=1)
    architecture: str
    cores: int = Field(ge=1)
    nominal: Nominal
    rates: dict[str, float] = Field({})

    def identity(self, name: str) -> dict[str, Any]:
        """Return the constants that say which devices they are of."""
        return {
            "card": name,
            "products": self.products,
            "architectures": (self.architecture,),
            "cores": self.cores,
        }

    def ratios(self, fitted: Card) -> dict[str, float]:
        """Return by what each constant that was fitted on another card is multiplied, by its name,
        perhaps with that of a section around it: by the ratio of what bounds it."""
        ours, theirs = self.nominal, fitted.nominal
        cores = self.cores / fitted.cores  # which share L2
        half = ours.bfloat16_tflops / theirs.bfloat16_tflops
        assert theirs.float8_tflops is not None
        e4m3 = (ours.float8_tflops or ours.bfloat16_tflops) / theirs.float8_tflops
        float32 = ours.float32_tflops / theirs.float32_tflops
        bounds = (
            (half, "tflops gathered_tflops permuted_tflops ready_tflops"),
            (half / cores, "tflops_per_core float16_tflops_per_core bfloat16_tflops_per_core"),
            (e4m3 / cores, "float8_tflops_per_core scaled.tflops_per_core"),
            (e4m3 / half, "e4m3_times"),
            (float32 / cores, "float32_tflops_per_core"),
            (
                ours.memory_gbs / theirs.memory_gbs,
                "memory_gbs weights_gbs results_gbs loads_gbs sums_gbs scattered_sums_gbs sum_gbs "
                "merge_gbs scale_gbs rows_gbs fill_gbs",
            ),
            (cores, "lines_a_us mailed_tiles.loads_gbs sum_cached_gbs"),
            (ours.link_gbs / theirs.link_gbs, "p2p_gbs egress_gbs copy_engine_gbs"),
        )
        return {name: ratio for ratio, names in bounds for name in names.split()}


class _File(Model):
    cards: dict[str, Card]


@cache
def cards() -> dict[str, Card]:
    """Return the known cards, by name (``h200``); the first of an architecture stands for devices of
    it whose name is not known."""
    return _File.from_file(FILE, "file of cards").cards


class ChipMachine(Model):
    """Devices of one kind in a backend's data file: the number of cores of one, and the constants.
    A ``chip`` in the file names an architecture, whose first card, on which they were fitted, supplies
    the cores and those constants that belong to the card itself."""

    cores: int = Field(ge=1)
    constants: MachineConstants | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_chip(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or "chip" not in tree:
            return tree
        chip, own = tree["chip"], tree["constants"]
        first = {each.architecture: name for name, each in reversed(cards().items())}
        if chip not in first:
            known = ", ".join(dict.fromkeys(each.architecture for each in cards().values()))
            raise ValueError(f"chip {chip!r} is unknown; {FILE.name} has: {known}")
        name = first[chip]
        card = cards()[name]
        twice = sorted(card.rates.keys() & own.keys())
        if twice:
            raise ValueError(f"{', '.join(twice)}: {FILE.name} has it for {chip!r} already")
        constants = {
            **own,
            **card.rates,
            **card.identity(name),
            "source": f"{own['source']}. Card: {card.source}",
        }
        rest = {key: value for key, value in tree.items() if key != "chip"}
        return {**rest, "cores": card.cores, "constants": constants}

    @cached_property
    def of_others(self) -> tuple[MachineConstants, ...]:
        """The constants with the cards that were never measured."""
        fitted = None if self.constants is None else self.constants.card
        return tuple(self._constants(name) for name in cards() if fitted not in (None, name))

    @cached_property
    def others(self) -> Mapping[str, Self]:
        """The machines with these cards, by name."""
        return {one.card: self.with_card(one) for one in self.of_others if one.card is not None}

    def with_card(self, constants: MachineConstants) -> Self:
        """Return the machine with the card of such constants, one of :attr:`of_others`."""
        assert constants.card is not None
        tree = _scaled(self.model_dump(exclude={"constants"}), self._ratios(constants.card))
        cores = cards()[constants.card].cores
        return type(self).model_validate({**tree, "cores": cores, "constants": constants})

    def _ratios(self, name: str) -> Mapping[str, float]:
        assert self.constants is not None
        assert self.constants.card is not None
        return cards()[name].ratios(cards()[self.constants.card])

    def _constants(self, name: str) -> MachineConstants:
        assert self.constants is not None
        card, fitted = cards()[name], self.constants.card
        tree = _scaled(self.constants.model_dump(), self._ratios(name)) | card.identity(name)
        tree |= {
            "name": f"{name}, never measured",
            "source": f"{card.source}; it is taken to reach the shares of them that {fitted} reaches",
            "measured": False,
            "fitted_to": (),
        }
        if card.nominal.float8_tflops is None:
            tree["float8_tflops_per_core"] = None
        made = MachineConstants.model_validate(tree)
        # The order that Lamport exchanges want was argued for one architecture (device/mailbox.cuh).
        return made if made.architectures == self.constants.architectures else made.by_flags()


def _scaled(tree: Any, by: Mapping[str, float], above: tuple[str, ...] = ()) -> Any:
    """Multiply the numbers in a tree whose name, or section and name, is in ``by``."""
    if isinstance(tree, dict):
        return {name: _scaled(value, by, (*above, name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_scaled(value, by, above) for value in tree]
    if not isinstance(tree, float):
        return tree
    names = (*(f"{section}.{above[-1]}" for section in above), above[-1])
    return tree * next((by[name] for name in names if name in by), 1.0)
