"""The benchmark: contenders take turns on fresh data, are timed alike, and judged in the same run.

``protocol`` times one turn; ``contenders`` and ``symm_mem`` are what is timed; ``problem`` makes the
data and knows the truth; ``rank`` runs the turns of one process and ``run`` the processes; ``figures``
turns times into the numbers that ``report``, ``plot`` and ``numbers`` show.
"""
