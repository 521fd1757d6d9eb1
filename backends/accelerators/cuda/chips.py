"""Products with CUDA chips, whichever backend runs on them, from ``chips.json`` beside this file.

Constants were fitted on one card. Another one, which was never measured, is taken to reach the same
share of its nominal figures: each constant is multiplied by the ratio of the two cards' figures that
bound it (:meth:`Card.ratios`). What is not listed there, such as every latency and what one block
moves, stays. The card of a product that is not listed follows from what the driver reports of a device
(:func:`by_clock`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from mkernel.topology.cost import MachineConstants
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import FABRIC_HOST, Accelerator, Model, Node, Topology
from mkernel.topology.sources.chips import architecture, cores, is_product, product
from mkernel.topology.world_map import speed

FILE = Path(__file__).with_name("chips.json")
_BY_CLOCK = re.compile(
    r"(.*) by its clock \((sm_\d+), (\d+) x ([\d.e+]+) MHz, "
    r"memory ([\d.e+]+) GB/s, link ([\d.e+]+) GB/s\)"
)
_MOST_MADE = 64


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
        """Return by what each constant that was fitted on another card is multiplied: by the ratio of
        the figures that bound it."""
        ours, theirs = self.nominal, fitted.nominal
        assert theirs.float8_tflops is not None
        return ratios_by(
            cores=self.cores / fitted.cores,
            half=ours.bfloat16_tflops / theirs.bfloat16_tflops,
            e4m3=(ours.float8_tflops or ours.bfloat16_tflops) / theirs.float8_tflops,
            float32=ours.float32_tflops / theirs.float32_tflops,
            memory=ours.memory_gbs / theirs.memory_gbs,
            link=ours.link_gbs / theirs.link_gbs,
        )


def ratios_by(
    *, cores: float, half: float, e4m3: float, float32: float, memory: float, link: float
) -> dict[str, float]:
    """Return by what constants are multiplied, by their names, perhaps with that of a section around
    them, where these figures of a device change: cores, which share L2, products of all cores, memory,
    and links to peers."""
    bounds = (
        (half, "tflops gathered_tflops permuted_tflops ready_tflops"),
        (half / cores, "tflops_per_core float16_tflops_per_core bfloat16_tflops_per_core"),
        (e4m3 / cores, "float8_tflops_per_core scaled.tflops_per_core"),
        (e4m3 / half, "e4m3_times"),
        (float32 / cores, "float32_tflops_per_core"),
        (
            memory,
            "memory_gbs weights_gbs results_gbs loads_gbs sums_gbs scattered_sums_gbs sum_gbs "
            "merge_gbs scale_gbs rows_gbs fill_gbs",
        ),
        (cores, "lines_a_us mailed_tiles.loads_gbs sum_cached_gbs"),
        (link, "p2p_gbs egress_gbs copy_engine_gbs"),
    )
    return {name: ratio for ratio, names in bounds for name in names.split()}


class Cycle(Model):
    """The flop of dense products, added up in float32, that a multiprocessor of an architecture
    computes in a clock cycle; and the rate of such devices' PCIe in one direction."""

    bfloat16: int = Field(gt=0)
    float8: int | None = Field(gt=0, description="None: it has no products of e4m3")
    float32: int = Field(gt=0)
    pcie_gbs: float = Field(gt=0)


class _Cycles(Sourced):
    halved: tuple[str, ...] = Field(description="products with half of the rates of matrices")
    architectures: dict[str, Cycle]


class _File(Model):
    cards: dict[str, Card]
    cycles: _Cycles


@cache
def _file() -> _File:
    return _File.from_file(FILE, "file of cards")


def cards() -> dict[str, Card]:
    """Return the known cards, by name (``h200``); the first of an architecture stands for devices of
    it whose name is not known."""
    return _file().cards


def by_clock(device: Accelerator, node: Node) -> str | None:
    """Return the name of the card that :func:`card` makes of a device of that node, which holds all
    figures: plans have nothing else of a card. Its link is what the node's links of known rate carry,
    or PCIe. None: the product is a known card, or a figure is unknown."""
    chip, count, cycles = architecture(device), cores(device), _file().cycles.architectures
    if chip not in cycles or not (count and device.clock_mhz and device.memory_gbs):
        return None
    if any(is_product(device, each.products) for each in cards().values()):
        return None
    ends = (one for one in node.fabric if device.id in one.ends and FABRIC_HOST not in one.ends)
    link = sum(one.gbs or 0.0 for one in ends)
    link = link if link >= 1 else cycles[chip].pcie_gbs
    return (
        f"{product(device)} by its clock ({chip}, {count} x {device.clock_mhz:g} MHz, "
        f"memory {device.memory_gbs:g} GB/s, link {link:g} GB/s)"
    )


@lru_cache(maxsize=_MOST_MADE)
def card(name: str) -> Card | None:
    """Return a card by its name, a known one or one that :func:`by_clock` named; None: neither."""
    made, cycles = _BY_CLOCK.fullmatch(name), _file().cycles
    if made is None or made[2] not in cycles.architectures:
        return cards().get(name)
    cycle = cycles.architectures[made[2]]
    clock_mhz, memory_gbs, link_gbs = map(float, made.groups()[3:])
    tera = int(made[3]) * clock_mhz * 1e-6  # cycles a second, all multiprocessors together
    matrices = tera / 2 if any(each in made[1] for each in cycles.halved) else tera
    return Card(
        source=f"what the driver reports of the device, and {cycles.source}",
        products=(made[1],),
        architecture=made[2],
        cores=int(made[3]),
        nominal=Nominal(
            bfloat16_tflops=matrices * cycle.bfloat16,
            float8_tflops=cycle.float8 and matrices * cycle.float8,
            float32_tflops=tera * cycle.float32,
            memory_gbs=memory_gbs,
            link_gbs=link_gbs,
        ),
    )


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

    def cards_of(self, topology: Topology) -> tuple[MachineConstants, ...]:
        """Return the constants with the cards of :func:`by_clock`. The slowest come first, because a
        product's name may be the beginning of another one."""
        nodes = {(id(node.accelerators), id(node.fabric)): node for node in topology.nodes}
        names = {by_clock(device, node) for node in nodes.values() for device in node.accelerators}
        made = [self.on_card(name).constants for name in sorted(filter(None, names))]
        return tuple(sorted(filter(None, made), key=speed))

    def on_card(self, name: str) -> Self:
        """Return the machine with a card; itself if it was fitted on it, or there is no such card."""
        fitted = None if self.constants is None else self.constants.card
        if fitted in (None, name) or card(name) is None:
            return self
        if name not in self._on_cards:
            if len(self._on_cards) == _MOST_MADE:
                self._on_cards.clear()
            self._on_cards[name] = self.with_card(name)
        return self._on_cards[name]

    @cached_property
    def _on_cards(self) -> dict[str, Self]:
        """The machines with other cards, as far as they were made."""
        return {}

    def with_card(self, name: str) -> Self:
        """Make the machine with a card that exists."""
        constants = self._constants(name)
        tree = scaled(self.model_dump(exclude={"constants"}), self._ratios(name))
        return type(self).model_validate({**tree, "cores": constants.cores, "constants": constants})

    def _ratios(self, name: str) -> Mapping[str, float]:
        assert self.constants is not None
        assert self.constants.card is not None
        its = card(name)
        assert its is not None
        return its.ratios(cards()[self.constants.card])

    def _constants(self, name: str) -> MachineConstants:
        assert self.constants is not None
        its, fitted = card(name), self.constants.card
        assert its is not None
        tree = scaled(self.constants.model_dump(), self._ratios(name)) | its.identity(name)
        tree |= {
            "name": f"{name}, never measured",
            "source": f"{its.source}; it is taken to reach the shares of them that {fitted} reaches",
            "measured": False,
            "fitted_to": (),
        }
        if its.nominal.float8_tflops is None:
            tree["float8_tflops_per_core"] = None
        made = MachineConstants.model_validate(tree)
        # The order that Lamport exchanges want was argued for one architecture (device/mailbox.cuh).
        return made if made.architectures == self.constants.architectures else made.by_flags()


def scaled(tree: Any, by: Mapping[str, float], above: tuple[str, ...] = ()) -> Any:
    """Multiply the numbers in a tree whose name, or section and name, is in ``by``."""
    if isinstance(tree, dict):
        return {name: scaled(value, by, (*above, name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [scaled(value, by, above) for value in tree]
    if not isinstance(tree, float):
        return tree
    names = (*(f"{section}.{above[-1]}" for section in above), above[-1])
    return tree * next((by[name] for name in names if name in by), 1.0)
