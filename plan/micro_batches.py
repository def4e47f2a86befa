"""Which micro-batches compose a global batch, on a number of workers and with a batch-norm span."""
import math

from common.errors import UserError

LARGEST = 64  # samples, unless --micro_batch_size or --batch_norm_span ask for more


def possible(batch: int, given: int | None, workers: int, in_pairs: bool, elastic: bool, span: int = 1) -> list[int]:
    """Returns the possible sizes of a micro-batch. Raises UserError if there is none.

    With `elastic`, workers may have different numbers of micro-batches: if no other size fits, or is a multiple of the
    batch-norm span, because workers cannot share one then.
    """
    sizes = [given] if given else [size for size in divisors(batch) if not in_pairs or size % 2 == 0]
    fitting = [size for size in sizes if batch % (workers * size) == 0]
    if elastic and not any(size % span == 0 for size in fitting):
        uneven = [size for size in sizes if batch % size == 0 and batch >= workers * size]
        fitting = [size for size in uneven if size % span == 0] or uneven
    if fitting:
        return fitting
    unit = workers * (given or 1 + in_pairs)
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    nearest = " and ".join(str(size) for size in (below, above) if size)
    by = f"{workers} worker{'s' * (workers > 1)}" + (
        f" x --micro_batch_size={given}" if given else " x 2, for --mixup and --cutmix" * in_pairs)
    raise UserError(f"--batch_size: {batch} is not divisible by {by}; the nearest sizes that are: {nearest}")


def for_span(span: int, micros: list[int], workers: int) -> int:
    """Returns the micro-batch size for a batch-norm span. micros: the sizes that divide a worker's part of the batch.

    It is the largest multiple of the span up to 64, or the span itself. If none of the sizes is a multiple, it is the
    largest that divides the span, so that the fewest workers share statistics. Raises UserError, with the nearest
    possible spans.
    """
    multiples = [size for size in micros if size % span == 0 and (size <= max(span, LARGEST)
                                                                  or len(micros) == 1)]
    shared = [size for size in micros if span % size == 0 and workers % (span // size) == 0]
    if multiples or shared:
        return max(multiples or shared)
    spans = {part for size in micros for part in divisors(size)} | {
        size * group for size in micros for group in divisors(workers)}
    nearest = [max((size for size in spans if size < span), default=None),
               min((size for size in spans if size > span), default=None)]
    raise UserError(f"--batch_norm_span: {span} samples cannot be composed of micro-batches of "
                    f"{' or '.join(map(str, micros[-3:]))} on {workers} worker{'s' * (workers > 1)}; the nearest "
                    f"possible spans: {' and '.join(str(size) for size in nearest if size)}")


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
