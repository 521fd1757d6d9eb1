"""A world: the ranks that call ops together, and everything that they share.

Nothing is imported here: a plan needs :mod:`mkernel.world.identity`, and does without torch.
"""
