"""--expect: the validation top-1 of another run or of a paper over the epochs, with which a training is compared."""
import json
from dataclasses import dataclass

import numpy as np

from common.flags import file_text
from common.run_folder import top1_of
from plan.values import fraction


@dataclass(frozen=True)
class Expected:
    """A curve: points in ascending order, and straight lines between them."""

    path: str
    points: tuple[tuple[float, float], ...]  # (epoch, top-1 as a fraction of 1)

    @classmethod
    def read(cls, path: str) -> "Expected":
        """Reads metrics.jsonl of a run, or a table with a line `epoch top1` for each point, where # starts a comment.

        Raises ValueError, also if the file is missing.
        """
        try:
            lines = [line.partition("#")[0].strip() for line in file_text(path).splitlines()]
        except OSError as error:
            raise ValueError(error.strerror) from None
        points = dict(_point(number, line) for number, line in enumerate(lines, 1) if line)
        if not points:
            raise ValueError("it has no line 'epoch top1', and no evaluation of a metrics.jsonl")
        return cls(path, tuple(sorted(points.items())))

    def top1_at(self, epoch: float) -> float | None:
        """Returns the top-1 at an epoch, or None before the first point and after the last."""
        epochs, top1 = zip(*self.points, strict=True)
        return float(np.interp(epoch, epochs, top1)) if epochs[0] <= epoch <= epochs[-1] else None


def _point(number: int, line: str) -> tuple[float, float]:
    """Returns the epoch and top-1 of a line. Raises ValueError with its number."""
    try:
        if line.startswith("{"):
            row = json.loads(line)
            return float(row["epoch"]), float(top1_of(row))
        epoch, top1 = line.split()
        return float(epoch), fraction(top1)
    except (KeyError, TypeError, ValueError) as error:
        reason = f": {error}" if "fraction" in str(error) else ", such as '90 0.759'"
        raise ValueError(f"line {number} is neither 'epoch top1' nor a row of metrics.jsonl{reason}") from None
