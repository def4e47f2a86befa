"""Measures what the live report costs: processor time of its thread, as a fraction of that of a training of the digits.

    uv run python -m benchmarks.live_page [flags of train.py]

The thread writes outcomes.json, classes.csv, predictions.csv and samples.jpg, and draws the page. Its time is that of
the thread's own clock, which other work on the machine does not change.
"""
import contextlib
import json
import sys
import tempfile
import time

import train
from reporting.report_writer import ReportWriter


def main(flags: list[str]) -> None:
    """Trains in this process and prints a line of JSON."""
    spent = []

    def measured(writer, action, *arguments):
        began = time.thread_time()
        writer._guarded(action, *arguments)
        spent.append(time.thread_time() - began)

    ReportWriter._submit = lambda writer, *what: writer._thread.submit(measured, writer, *what)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        train.main(["train.py", "--data_dir=digits", f"--output_dir={folder}", *flags])
    of_all = time.process_time()
    print(json.dumps({"drawings": len(spent), "seconds": round(sum(spent), 3), "training": round(of_all, 1),
                      "percent": round(100 * sum(spent) / of_all, 2)}))


if __name__ == "__main__":
    main(sys.argv[1:])
