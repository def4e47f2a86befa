"""The idea of Bigbatch in one training loop: the same updates on any number of workers.

    uv run python -m examples.minimal
    uv run mpirun --oversubscribe -np 2 python -m examples.minimal

It trains a small network on the built-in digits with LARS. Rank 0 prints the validation accuracy and a checksum of the
weights. Both are the same on 1, 2, 4 or 8 workers, to the bit: the order of samples is one endless stream, a global
batch is always the same micro-batches, and their gradients are added as integers.
"""
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from data.augmentation import Augmentation
from data.dataset import open_dataset
from data.feed import Feed
from data.named import built_in
from distributed.exchange import GradientExchange
from distributed.fixed_point import FixedPoint
from distributed.optimizer import build, wrap
from model_zoo import create_model
from optim.lars import LARS
from optim.schedules import LearningRate, Piecewise
from training.step import apply, average
from training.weight_check import checksum, in_hexadecimal

EPOCHS, BATCH, MICRO_BATCH, SIZE, SEED = 15, 128, 16, 16, 0  # BATCH: over all workers


def train() -> tf.keras.Model:
    """Trains on the workers that have started Horovod; returns the model, the same on all of them."""
    # 1. One order of samples. Each worker reads its micro-batches of each global batch.
    dataset = open_dataset(built_in("digits"))
    feed = Feed(dataset, SIZE, Augmentation(), SEED, shard=hvd.rank(), shards=hvd.size())
    steps = EPOCHS * dataset.train.samples // BATCH
    micro_batches, own = BATCH // MICRO_BATCH, BATCH // MICRO_BATCH // hvd.size()

    # 2. LARS, inside Horovod's DistributedOptimizer, and the exchange of its gradients: a ring here.
    model = create_model("convnet", len(dataset.classes), SIZE, seed=SEED, mean=dataset.mean, std=dataset.std)
    variables = model.trainable_variables
    optimizer = wrap(LARS(0.0, momentum=0.9, weight_decay=1e-4))
    exchange = GradientExchange()
    build(optimizer, variables)
    rate = LearningRate(Piecewise.parse(5), EPOCHS, "poly", 2.0, warmup="gradual", warmup_epochs=2)

    # 3. An update: gradients summed over the micro-batches, one exchange, one step of the optimizer.
    sums = FixedPoint(micro_batches)
    groups = exchange.groups(variables, sums)

    @tf.function
    def terms(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True), True)
            loss = tf.reduce_mean(loss)
        return sums.terms(tape.gradient(loss, variables), groups)

    @tf.function
    def update(summed):
        means, norms = average(exchange, optimizer, summed, variables, micro_batches, sums)
        apply(optimizer, means, norms, variables)

    with feed.train(0, steps, BATCH, MICRO_BATCH) as batches:
        for step in range(steps):
            summed = terms(*next(batches))
            for _ in range(own - 1):
                summed = [a + b for a, b in zip(summed, terms(*next(batches)), strict=True)]
            optimizer.learning_rate.assign(rate(step * BATCH / dataset.train.samples))
            update(summed)
    return model


def accuracy(model: tf.keras.Model) -> float:
    """Returns the accuracy on the validation set. Each worker evaluates its shard, and each sample counts once."""
    dataset = open_dataset(built_in("digits"))
    feed, hits = Feed(dataset, SIZE, Augmentation(), SEED, shard=hvd.rank(), shards=hvd.size()), 0
    with feed.validation(64) as (batches, samples):
        for start in range(0, samples, 64):
            images, labels = next(batches)
            right = tf.argmax(model(images), axis=1) == labels[:, 0]
            hits += int(tf.math.count_nonzero(right[:samples - start]))  # the last batch is padded
    return int(hvd.allreduce(tf.constant(hits), op=hvd.Sum)) / dataset.validation.samples


def main() -> None:
    """Trains, evaluates and prints."""
    hvd.init()
    tf.config.set_visible_devices([], "GPU")
    tf.config.experimental.enable_op_determinism()
    tf.keras.utils.set_random_seed(SEED)
    trained = train()
    top1 = accuracy(trained)
    if hvd.rank() == 0:
        print(f"top-1 {top1:.4f}, weights {in_hexadecimal(int(checksum(trained.variables)))}")
    hvd.allreduce(tf.constant(0))  # mpirun ends all workers when the first one leaves


if __name__ == "__main__":
    sys.exit(main())
