"""--expect: the validation top-1 of another run or of a paper over the epochs, with which a training is compared."""
import json
import math
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

        A last row that is half-written is left out. Raises ValueError, also if the file is missing.
        """
        try:
            text = file_text(path)
        except OSError as error:
            raise ValueError(error.strerror) from None
        whole, _, last = text.rpartition("\n")
        is_cut = last.startswith("{") and not last.endswith("}")
        lines = [line.partition("#")[0].strip() for line in (whole if is_cut else text).splitlines()]
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
            epoch, top1 = float(row["epoch"]), float(top1_of(row))
        else:
            epoch, top1 = line.split()
            epoch, top1 = float(epoch), fraction(top1)
        if not (math.isfinite(epoch) and 0 <= top1 <= 1):
            raise ValueError(f"its epoch is {epoch:g} and its top-1 {top1:g}, not a fraction from 0 to 1")
    except (KeyError, TypeError, ValueError) as error:
        reason = f": {error}" if "fraction" in str(error) else ", such as '90 0.759'"
        raise ValueError(f"line {number} is neither 'epoch top1' nor a row of metrics.jsonl{reason}") from None
    return epoch, top1
