"""A measured, checked run of one op on this machine: what ``mkernel run`` does.

``spec`` says what to run, ``inputs`` makes or loads the tensors, ``rank`` is one rank's part,
``verify`` judges results against float64, ``report`` is the outcome as data, ``files`` and
``timeline`` write it out.
"""
