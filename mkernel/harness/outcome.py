"""The ends of a check, other than well."""


class CheckFailed(AssertionError):
    """The promise is broken; the message says how, with the case and the numbers."""


class CheckSkipped(Exception):
    """The backend does not claim what the check tests; the message says what."""


class HarnessError(Exception):
    """The kit itself could not do its work: nothing is said of the backend."""
