"""Errors that a user can mend, and how a user is told: one line, without a traceback."""
import sys


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what is wrong and what to do."""


def complain(message) -> None:
    print(f"train.py: {message}", file=sys.stderr, flush=True)
