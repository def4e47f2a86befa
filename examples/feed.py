"""DALI's batches alone, for a training loop of your own: `uv run python -m examples.feed`."""
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.named import built_in

dataset = open_dataset(built_in("digits"))  # or the folder of a dataset
feed = Feed(dataset, image_size=32, augmentation=AUGMENTATIONS["crop"], seed=0, shard=0, shards=1)
with feed.train(position=0, steps=11, batch_size=128, micro_batch_size=64) as batches:
    for _ in range(22):
        images, labels = next(batches)  # uint8 (64, 32, 32, 3), int64 (64, 1)
print(images.dtype.name, images.shape, labels.shape)
