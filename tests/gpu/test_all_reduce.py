"""AllReduce on GPUs, beside ``test_calls_on_gpus``: results in e4m3, and ranks that do not come."""

from __future__ import annotations

import norm_ranks
import pytest
from device_buffers import needs_gpus, several, worlds
from families import ROWS
from kept_ranks import right
from survivors import judge_absence, judge_survivors

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


@several
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(world: int) -> None:
    judge_absence("hopper", ROWS[0], world)


@several
def test_a_rank_killed_while_kernels_wait_for_it(world: int) -> None:
    judge_survivors("hopper", ROWS[1], world)


@worlds
def test_rows_in_e4m3_are_those_of_the_host(world: int) -> None:
    right(world, norm_ranks.quantised)
