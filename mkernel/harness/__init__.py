"""The harness: runs ops on ranks of this machine, times them, checks every result and reports.

``mkernel run`` measures one op in three views, ``mkernel bench`` ops beside their peers. Both are a
``spec.Job`` of cases (``mkernel.cases``) and contenders, which ``rank.run`` works off in each rank's
process: a ``problem`` is a case as one rank sees it, ``work`` says what a contender does with it in a
turn, ``turns`` who takes turns, ``protocol`` how a turn is timed, and ``verdict`` what counts as right.

The room ``contenders`` has the table of those: mkernel itself (``own``) and its peers, in a file for
each library or family of ops. ``run_report`` and ``timeline`` report the first command, ``bench_run``,
``figures`` and ``bench_report`` the second; ``results`` is its file, ``numbers`` the page of many.
``nic_ranks`` starts the ranks of checks and measurements of NICs.
"""
