"""Compares a step of LARS and Muon with one of Keras's SGD with momentum, on the variables of a model, on this machine.

    uv run python -m benchmarks.optimizer_step [--model=resnet50] [--rounds=15]

Each round times every candidate once, in turn, so that a drift of the machine's speed affects all candidates alike.
The output shows medians, and the median of the ratio to Keras's SGD per round.
"""
import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import model_zoo
from optim.lars import LARS, SGD
from optim.muon import Muon
from optim.stacks import norms, stacked, stacks_of

STEPS = 5  # in each round


def updates(shapes, optimizer):
    """Returns a compiled step of the optimizer on its own variables."""
    variables = [tf.Variable(tf.random.normal(shape), name="kernel" if len(shape) > 1 else "bias") for shape in shapes]
    gradients = [tf.random.normal(shape) * 1e-3 for shape in shapes]

    @tf.function
    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return step


def kernel(shapes):
    """Returns a compiled step of only the fused momentum kernel, which shows the cost of memory traffic."""
    variables, buffers, gradients = ([tf.Variable(tf.random.normal(shape)) for shape in shapes] for _ in range(3))

    @tf.function
    def step():
        for variable, buffer, gradient in zip(variables, buffers, gradients, strict=True):
            tf.raw_ops.ResourceApplyKerasMomentum(var=variable.handle, accum=buffer.handle, lr=1e-3, grad=gradient,
                                                  momentum=0.9)

    return step


def norms_only(shapes):
    """Returns a compiled step of only the norms of weights and gradients in LARS."""
    variables, gradients = ([tf.Variable(tf.random.normal(shape)) for shape in shapes] for _ in range(2))
    stacks = stacks_of(variables)

    @tf.function
    def step():
        return [norms(stacks, stacked(stacks, tensors)) for tensors in (variables, gradients)]

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=sorted(model_zoo.MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    info = model_zoo.MODELS[options.model]
    shapes = [v.shape for v in model_zoo.create_model(options.model, 1000, info.image_size).trainable_variables]
    keras = tf.keras.optimizers
    candidates = {
        "Keras SGD, momentum": updates(shapes, keras.SGD(1e-3, 0.9, jit_compile=False)),
        "Keras SGD, momentum, weight decay": updates(shapes, keras.SGD(1e-3, 0.9, weight_decay=1e-4,
                                                                       jit_compile=False)),
        "bigbatch SGD, weight decay": updates(shapes, SGD(1e-3, 0.9, weight_decay=1e-4)),
        "bigbatch LARS": updates(shapes, LARS(1e-3, 0.9)),
        "bigbatch LARS, weight decay": updates(shapes, LARS(1e-3, 0.9, weight_decay=1e-4)),
        "bigbatch Muon, weight decay": updates(shapes, Muon(1e-3, 0.9, weight_decay=1e-4)),
        "momentum kernel alone": kernel(shapes),
        "norms alone": norms_only(shapes),
    }
    for step in candidates.values():
        step()
    times = {name: [] for name in candidates}
    for _ in range(options.rounds):
        for name, step in candidates.items():
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[name].append((time.perf_counter() - begun) / STEPS * 1e3)
    base = times["Keras SGD, momentum"]
    print(f"{len(shapes)} variables, {sum(s.num_elements() for s in shapes):,} parameters; {os.cpu_count()} cores")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
        print(f"{name:36s} {statistics.median(taken):7.1f} ms   {ratio:5.2f} x Keras SGD")


if __name__ == "__main__":
    main()
