"""Standard output, which carries JSON alone."""
import contextlib
import os
import sys


@contextlib.contextmanager
def json_alone_on_stdout():
    """Sends what libraries print on standard output (DALI its errors) to standard error, and our own JSON to it."""
    sys.stdout.flush()
    ours, kept = os.dup(1), sys.stdout
    os.dup2(2, 1)
    try:
        with open(os.dup(ours), "w") as sys.stdout:
            yield
    finally:
        sys.stdout = kept
        os.dup2(ours, 1)
        os.close(ours)
