"""Floor 0: what a user did wrong, in one line."""


class UserError(ValueError):
    """Bad input: the message says what was expected, what was got, and the way out. The command line exits with 2."""
