"""Models: parameter counts against published figures, output shapes, initial values, dropout, two training steps."""
import numpy as np
import pytest
import tensorflow as tf

import model_zoo
from optim.lars import SGD

# Trainable parameters for 1,000 classes. ResNets: as torchvision's documentation lists them. AlexNet: Caffe's
# reference model. AlexNet-BN: AlexNet less the 1,376 + 8,192 biases of seven layers, plus as many gammas and betas.
PUBLISHED = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "resnet152": 60_192_808, "resnet50_v1": 25_557_032, "resnet101_v1": 44_549_160, "resnet152_v1": 60_192_808,
    "alexnet": 60_965_224, "alexnet_bn": 60_965_224 + 1376 + 8192,
}
SMALLEST = {"alexnet": 67, "alexnet_bn": 67}


def size(model):
    return sum(v.shape.num_elements() for v in model.trainable_variables)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    model = model_zoo.create_model(name, 1000, model_zoo.MODELS[name].image_size)
    assert size(model) == PUBLISHED[name]
    assert model.output_shape == (None, 1000) and model.output.dtype == "float32"


def test_resnet20_has_its_published_size():
    """0.27 million parameters (arXiv:1512.03385, table 6), by hand for 10 classes.

    Convolutions 432 + 6 * 2304 + (4608 + 5 * 9216) + (18432 + 5 * 36864), gamma and beta of 7 norms of 16, 6 of 32
    and 6 of 64 channels, dense 640 + 10.
    """
    model = model_zoo.create_model("resnet20", 10, 32)
    assert size(model) == 432 + 13824 + 50688 + 202752 + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 650 == 269722
    assert sum(len(v.shape) == 4 for v in model.trainable_variables) == 19


@pytest.mark.parametrize(("name", "sizes"), [("resnet50", [112, 56, 56, 28, 14, 7]), ("alexnet", [55, 27, 13, 6])])
def test_feature_maps_shrink_as_published(name, sizes):
    """arXiv:1512.03385, table 1; AlexNet's 55, 27, 13 and 6."""
    model = model_zoo.create_model(name, 10, model_zoo.MODELS[name].image_size)
    seen = [layer.output_shape[1] for layer in model.layers if len(np.shape(layer.output_shape)) == 1
            and len(layer.output_shape) == 4 and "padding" not in layer.name and "input" not in layer.name]
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys(sizes))


def test_where_v1_and_v15_stride():
    def strided(name):
        model = model_zoo.create_model(name, 10, 64)
        return sorted(layer.kernel_size for layer in model.layers
                      if isinstance(layer, tf.keras.layers.Conv2D) and layer.strides == (2, 2))

    assert strided("resnet50") == [(1, 1)] * 3 + [(3, 3)] * 3 + [(7, 7)]  # projections, bottlenecks, stem
    assert strided("resnet50_v1") == [(1, 1)] * 6 + [(7, 7)]


@pytest.mark.parametrize(("name", "branches"), [("resnet18", 8), ("resnet50", 16)])
def test_residual_branches_end_in_a_zero_gamma(name, branches):
    model = model_zoo.create_model(name, 10, 64)
    gammas = [v for v in model.trainable_variables if "gamma" in v.name]
    assert sum(bool((v.numpy() == 0).all()) for v in gammas) == branches
    assert not any("bias" in v.name and "dense" not in v.name for v in model.trainable_variables)


def test_alexnet_starts_with_the_norms_of_the_papers_table_4():
    """arXiv:1708.03888, table 4: x.1 is the weight and x.0 the bias, whatever its caption says."""
    model = model_zoo.create_model("alexnet", 1000, 227, seed=1)
    norms = {v.name.split(":")[0]: float(tf.norm(v)) for v in model.trainable_variables}
    table = {"conv1": (1.86, 0.098), "conv2": (5.546, 0.16), "conv3": (9.40, 0.196), "conv4": (8.15, 0.196),
             "conv5": (6.65, 0.16), "fc6": (30.7, 6.4), "fc7": (20.5, 6.4), "fc8": (20.2, 0.316)}
    for layer, (weight, bias) in table.items():
        assert norms[f"{layer}/kernel"] == pytest.approx(weight, rel=0.01), layer
        assert norms[f"{layer}/bias"] == pytest.approx(bias, rel=0.01), layer


def two_steps(name, image_size, batch):
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(batch, image_size, image_size, 3)), tf.float32)
    labels = tf.constant(random.integers(0, 10, size=batch))
    model, optimizer = model_zoo.create_model(name, 10, image_size), SGD(0.01)
    before, losses = [v.numpy() for v in model.trainable_variables], []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    moved = [(v.numpy() != b).any() for v, b in zip(model.trainable_variables, before, strict=True)]
    return sum(moved) / len(moved)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.campaign if name.startswith(("resnet101", "resnet152")) else ())
    for name in model_zoo.MODELS])
def test_two_steps_move_the_weights(name):
    assert two_steps(name, SMALLEST.get(name, 32), batch=4) > 0.7  # a zero gamma holds back what is behind it


@pytest.mark.parametrize("name", ["resnet50", "alexnet"])
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_full_size_in_both_precisions(name, precision):
    tf.keras.mixed_precision.set_global_policy(precision)
    try:
        assert two_steps(name, model_zoo.MODELS[name].image_size, batch=2) > 0.7
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_the_seed_makes_the_weights():
    def kernels(seed):
        return [w.tobytes() for w in model_zoo.create_model("resnet20", 10, 32, seed=seed).get_weights() if w.ndim > 1]

    assert kernels(3) == kernels(3)
    assert not set(kernels(3)) & set(kernels(4))


def test_dropout_is_a_function_of_seed_stream_and_step():
    from model_zoo.layers import Dropout

    ones = tf.ones((64, 100))

    def masks(seed, stream, steps=3):
        layer = Dropout(0.4, seed, stream)
        return [layer(ones, training=True).numpy() for _ in range(steps)], layer

    first, layer = masks(7, 0)
    for a, b in zip(first, masks(7, 0)[0], strict=True):
        np.testing.assert_array_equal(a, b)
    others = [first[1], first[2], masks(8, 0)[0][0], masks(7, 1)[0][0], masks(7, 1)[0][1]]
    assert all((first[0] != other).mean() > 0.3 for other in others)
    assert first[0].mean() == pytest.approx(1, abs=0.05) and set(np.unique(first[0])) == {0, np.float32(1 / 0.6)}
    np.testing.assert_array_equal(layer(ones, training=False), ones)
    layer.set_weights([np.int64(1)])  # what a restored checkpoint does
    np.testing.assert_array_equal(layer(ones, training=True), first[1])
