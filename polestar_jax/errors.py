"""The one exception type for mistakes a user can mend."""


class PolestarError(ValueError):
    """Bad input: one sentence that names the offending value and the remedy.

    The command line prints it without a traceback and exits with code 2.
    """
