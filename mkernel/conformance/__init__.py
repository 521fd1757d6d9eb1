"""The judge of backends, ours and other people's: ``mkernel conformance`` and
``pytest --pyargs mkernel.conformance``.

A *check* tests one promise of a contract (``mkernel.backends.contracts``) and fails with a message that
names it. For each check there is a *planted fault*: a wrapper backend that breaks exactly that promise;
a test of ours asserts that the kit fails on it, by that check's name. A check without one does not
count.
"""
