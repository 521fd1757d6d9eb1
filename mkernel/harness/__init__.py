"""Runs an op on ranks of this machine, times it, checks every result and reports.

``mkernel run`` measures one op in three views; ``mkernel bench`` measures ops beside their peers.
"""
