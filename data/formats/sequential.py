"""Shared code of the formats whose DALI readers cannot follow a given order and read file after file.

Such a reader can start at any sample if every sample is declared a shard of its own and the reader moves from shard to
shard. From there it reads on in the order of its list of files. So a slice of the stream can be read exactly, from any
position.
"""


def reader_arguments(slices) -> dict:
    """Returns the arguments of a reader that starts at the first of these slices and reads on.

    Raises ValueError if a slice has gaps, if one other than the first does not start at the beginning of its file, or
    if one other than the last does not reach the end of its file.
    """
    sizes = [len(index) for _, index, _ in slices]
    for number, (path, _, samples) in enumerate(slices):
        has_gaps = len(samples) != samples[-1] - samples[0] + 1
        starts_late = number > 0 and samples[0] != 0
        ends_early = number < len(slices) - 1 and samples[-1] != sizes[number] - 1
        if has_gaps or starts_late or ends_early:
            raise ValueError(f"{path} can only be read in order and without gaps, file after file")
    return {"path": [str(path) for path, _, _ in slices], "num_shards": sum(sizes), "shard_id": int(slices[0][2][0]),
            "stick_to_shard": False, "name": "reader"}


def labelled(encoded, label):
    """Converts labels to int64 (1,), the form that all readers here return."""
    from nvidia.dali import fn, types

    return encoded, fn.cast(fn.reshape(label, shape=[1]), dtype=types.INT64)
