"""Buckets: gradients that are exchanged as one. Plain Python."""


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Lists of consecutive positions, from the last to the first, each of `limit` in all or of a single larger one.

    The backward pass gives gradients from the last layer's to the first's, so that a bucket is full, and can be sent,
    while those after it are still being computed.
    """
    made, room = [], 0
    for position in reversed(range(len(sizes))):
        if not made or sizes[position] > room:
            made.append([])
            room = limit
        made[-1].append(position)
        room -= sizes[position]
    return made
