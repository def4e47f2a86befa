"""Errors that a user can mend: train.py prints them as one line, without a traceback."""


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what is wrong and what to do."""
