"""A measured, checked run of one op on this machine: what ``mkernel run`` does.

``spec`` says what to run, ``inputs`` loads the user's tensors, ``rank`` is one rank's part (the op's
case, ``mkernel.cases``, makes random inputs and judges results against float64), ``report`` is the
outcome as data, ``files`` and ``timeline`` write it out.
"""
