"""What the formats share whose DALI readers follow no index of ours: they read file after file.

Told that every sample is a shard of its own, and to move on from shard to shard, such a reader starts at any sample
and reads on in the order of its list of files; so a piece of our stream can be read from any place, exactly.
"""


def place(pieces) -> dict:
    """The arguments with which a reader starts where the pieces do, of which all but the first are from a file's start.

    Raises ValueError for pieces that cannot be read so.
    """
    sizes = [len(index) for _, index, _ in pieces]
    for number, (path, _, samples) in enumerate(pieces):
        first, last = number == 0, number == len(pieces) - 1
        if len(samples) != samples[-1] - samples[0] + 1 or not (first or samples[0] == 0) or not (
                last or samples[-1] == sizes[number] - 1):
            raise ValueError(f"{path} can only be read on and on, file after file")
    return {"path": [str(path) for path, _, _ in pieces], "num_shards": sum(sizes), "shard_id": int(pieces[0][2][0]),
            "stick_to_shard": False, "name": "reader"}


def labelled(encoded, label):
    """Labels as every reader here gives them: int64 (1,)."""
    from nvidia.dali import fn, types

    return encoded, fn.cast(fn.reshape(label, shape=[1]), dtype=types.INT64)
