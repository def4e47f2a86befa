"""bigbatch's input as train.py uses it: the batches of data.feed.Feed in TensorFlow.

    python -m benchmarks.peers.bigbatch DATASET IMAGE_SIZE BATCH THREADS [RAND_AUGMENT [AUGMENTATION]]
"""
import sys
from dataclasses import replace

from benchmarks.peers.turns import serve
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.pipeline import DecoderSettings
from data.rand_augment import RandAugment


def main(folder: str, image_size: str, batch_size: str, threads: str, operations: str = "none",
         augmentation: str = "crop_flip") -> None:
    batch = int(batch_size)
    settings = DecoderSettings(threads=int(threads))
    chosen = replace(AUGMENTATIONS[augmentation], operations=RandAugment.parse(operations) or ())
    feed = Feed(open_dataset(folder), int(image_size), chosen, seed=0, device=settings)
    with feed.train(0, 512, batch, batch) as batches:
        serve(batches.__next__, batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
