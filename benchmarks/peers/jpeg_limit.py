"""The limit: libjpeg-turbo decodes whole images from memory on a number of threads, and nothing else runs.

    python -m benchmarks.peers.jpeg_limit FOLDER IMAGE_SIZE BATCH THREADS
"""
import itertools
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import simplejpeg

from benchmarks.peers.turns import serve


def main(folder: str, image_size: str, batch_size: str, threads: str) -> None:
    del image_size
    encoded = itertools.cycle([file.read_bytes() for file in sorted(Path(folder).rglob("*.jpg"))])
    count = int(batch_size)

    def decode(image):
        simplejpeg.decode_jpeg(image)  # releases the GIL

    with ThreadPool(int(threads)) as pool:
        serve(lambda: pool.map(decode, itertools.islice(encoded, count), chunksize=4), count)


if __name__ == "__main__":
    main(*sys.argv[1:])
