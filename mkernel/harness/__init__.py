"""Runs ops on ranks of this machine, times them, checks every result and reports.

``mkernel run`` measures one op in three views, ``mkernel bench`` ops beside their peers. Both share:
``problem`` (inputs and truth, from the op's case), ``work`` (what a turn does), ``turns`` (who takes
turns in a rank process), ``protocol`` (how a turn is timed) and ``verdict`` (what counts as right).
``views`` and ``run_*`` belong to the first command, ``bench_*`` to the second; ``figures`` turns times
into the numbers of a benchmark, ``results`` is its file, ``numbers`` the page of many.
"""
