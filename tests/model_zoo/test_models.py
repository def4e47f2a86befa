"""Models: parameter counts against published figures, output shapes, initial values, dropout, two training steps."""
import importlib

import numpy as np
import pytest
import tensorflow as tf
from conftest import built

import model_zoo
from model_zoo import cost
from model_zoo.layers import BatchNormalization, Dropout, masks_at
from model_zoo.whitened_convnet import SMALLEST as LEAST_VARIANCE
from model_zoo.whitened_convnet import filters
from optim.lars import SGD

# Trainable parameters for 1,000 classes. ResNets: as torchvision's documentation lists them. AlexNet: Caffe's
# reference model. AlexNet-BN: its norms learn nothing; or AlexNet less the 1,120 biases of four convolutions, plus the
# 1,376 gammas and as many betas of five.
PUBLISHED = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "resnet152": 60_192_808, "resnet50_v1": 25_557_032, "resnet101_v1": 44_549_160, "resnet152_v1": 60_192_808,
    "resnet50_nvcaffe": 25_557_032,
    "alexnet": 60_965_224, "alexnet_bn": 60_965_224, "alexnet_bn5": 60_965_224 - 1120 + 2 * 1376,
}
SMALLEST = {"alexnet": 67, "alexnet_bn": 67, "alexnet_bn5": 67}
pytestmark = pytest.mark.xdist_group("networks")  # of conftest.built


def size(model):
    return sum(v.shape.num_elements() for v in model.trainable_variables)


def has_max_pooling(model):
    return any(isinstance(layer, tf.keras.layers.MaxPooling2D) for layer in model.layers)


def marked(name):
    return pytest.param(name, marks=pytest.mark.campaign) if name.startswith(("resnet101", "resnet152")) else name


@pytest.mark.parametrize("name", [*map(marked, PUBLISHED)])
def test_published_sizes(name):
    model = built(name)
    assert size(model) == PUBLISHED[name]
    assert model.output_shape == (None, 1000) and model.output.dtype == "float32"
    assert model_zoo.MODELS[name].has_max_pooling == has_max_pooling(model)
    stored = cost.forward(name, model_zoo.MODELS[name].image_size)
    assert stored == pytest.approx(cost.counted(model).multiply_adds, rel=0.01)


@pytest.mark.parametrize(("name", "image_size"), [
    ("resnet20", 32), ("resnet20", 20), ("resnet10_narrow", 64), ("resnet10_narrow", 96), ("convnet", 32),
    ("convnet_bn", 32), ("whitened_convnet", 32), ("bn_convnet", 32)])
def test_the_cost_of_a_network_is_about_proportional_to_its_pixels(name, image_size):
    if name not in model_zoo.ZOO:
        assert cost.forward(name, image_size) == 0
    else:
        counted = cost.counted(model_zoo.create_model(name, 10, image_size)).multiply_adds
        assert cost.forward(name, image_size) == pytest.approx(counted, rel=0.02)


def test_resnet20_has_its_published_size():
    """0.27 million parameters (arXiv:1512.03385, table 6), by hand for 10 classes.

    Convolutions 432 + 6 * 2304 + (4608 + 5 * 9216) + (18432 + 5 * 36864), gamma and beta of 7 norms of 16, 6 of 32
    and 6 of 64 channels, dense 640 + 10.
    """
    model = model_zoo.create_model("resnet20", 10, 32)
    assert size(model) == 432 + 13824 + 50688 + 202752 + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 650 == 269722
    assert sum(len(v.shape) == 4 for v in model.trainable_variables) == 19
    assert model_zoo.MODELS["resnet20"].has_max_pooling == has_max_pooling(model)


def test_the_size_of_resnet10_narrow():
    """By hand: the first convolution, then each stage's two convolutions, norms and projection, and the dense layer."""
    model = model_zoo.create_model("resnet10_narrow", 10, 64)
    stages = [2 * 2304 + 64, 4608 + 9216 + 128 + 512 + 64, 18432 + 36864 + 256 + 2048 + 128,
              73728 + 147456 + 512 + 8192 + 256]
    assert size(model) == 1200 + 32 + sum(stages) + 1290
    sizes = [layer.output_shape[1] for layer in model.layers if "operators" in layer.name]  # after each block's sum
    assert sizes == [32, 16, 8, 4]
    assert model_zoo.MODELS["resnet10_narrow"].has_max_pooling == has_max_pooling(model)


@pytest.mark.parametrize(("name", "sizes"), [("resnet50", [112, 56, 56, 28, 14, 7]), ("alexnet", [55, 27, 13, 6])])
def test_feature_maps_shrink_as_published(name, sizes):
    """arXiv:1512.03385, table 1; AlexNet's 55, 27, 13 and 6."""
    model = built(name)
    seen = [layer.output_shape[1] for layer in model.layers if len(np.shape(layer.output_shape)) == 1
            and len(layer.output_shape) == 4 and "padding" not in layer.name and "input" not in layer.name]
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys(sizes))


def test_convnet_bn_normalizes_what_alexnet_bn_does():
    """The inputs of all convolutions but the first, with nothing to learn; its size is convnet's."""
    model = model_zoo.create_model("convnet_bn", 10, 32)
    assert size(model) == size(model_zoo.create_model("convnet", 10, 32))
    norms = [layer for layer in model.layers if "batch_normalization" in layer.name]
    assert [layer.input_shape[1:] for layer in norms] == [(16, 16, 16), (8, 8, 32)]
    inputs = [layer.input.name.partition("/")[0] for layer in model.layers if "conv2d" in layer.name]
    assert inputs[1:] == [layer.name for layer in norms]
    assert all(layer.epsilon == 1e-4 and not layer.trainable_variables for layer in norms)


@pytest.mark.parametrize("name", ["alexnet", "alexnet_bn", "alexnet_bn5", "convnet", "convnet_bn", "whitened_convnet"])
def test_pooling_leaves_something_of_the_least_image_size(name):
    least = model_zoo.MODELS[name].least_image_size
    model_zoo.create_model(name, 10, least)
    with pytest.raises(ValueError, match=r"[Nn]egative dimension|must be > 0|must be positive|cannot be zero"):
        model_zoo.create_model(name, 10, least - 1)


def test_the_size_of_whitened_convnet_and_its_initial_values():
    """1.97 million parameters (arXiv:2404.00498), by hand: six kernels, the last one, as many betas as norms have
    channels, and the bias of the first layer, whose kernel is not trained.

    The first channels of a kernel copy its inputs. The other filters are uniform between +-1 / root(9 inputs), so their
    squared norm is 1 / 3. Both are scaled to a root mean square of 0.2 of the whole kernel.
    """
    model = model_zoo.create_model("whitened_convnet", 10, 32, seed=3)
    assert size(model) == 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256**2) + 2560 + 2 * 64 + 4 * 256 + 24 == 1_971_352
    assert not model.get_layer("whitening").kernel.trainable
    assert model_zoo.MODELS["whitened_convnet"].has_max_pooling == has_max_pooling(model)
    *kernels, last = [v.numpy() for v in model.trainable_variables if "kernel" in v.name]
    assert last.std() == pytest.approx(1, abs=0.05)
    for kernel in kernels:
        assert np.sqrt(np.square(kernel).mean()) == pytest.approx(0.2, rel=1e-5)
        inputs, outputs = kernel.shape[2:]
        copies, drawn = np.split(kernel, [min(inputs, outputs)], axis=-1)
        scale = copies[1, 1, 0, 0]
        expected = np.zeros_like(copies)
        expected[1, 1] = scale * np.eye(inputs)
        np.testing.assert_array_equal(copies, expected)
        if drawn.size:
            assert np.abs(drawn).max() <= scale / np.sqrt(9 * inputs)
            assert np.square(drawn).sum() / drawn.shape[-1] == pytest.approx(scale**2 / 3, rel=0.05)


def test_the_filters_whiten_patches():
    """Each is divided by the root of its variance, so they tell the covariance. Its diagonal is 1, as the pixels are
    normalized, but for the edges of the images; it is the same in both rows, and in both columns.
    """
    kernel = filters().reshape(12, 24)
    np.testing.assert_array_equal(kernel[:, :12], -kernel[:, 12:])
    directions = kernel[:, :12] / np.linalg.norm(kernel[:, :12], axis=0)
    np.testing.assert_allclose(directions.T @ directions, np.eye(12), atol=1e-3)
    covariance = np.linalg.inv(kernel[:, :12] @ kernel[:, :12].T) - LEAST_VARIANCE * np.eye(12)
    np.testing.assert_allclose(np.diag(covariance), 1, atol=0.03)
    pixels = covariance.reshape(2, 2, 3, 2, 2, 3)
    np.testing.assert_allclose(pixels[0, 0, :, 0, 1], pixels[1, 0, :, 1, 1], atol=0.02)
    np.testing.assert_allclose(pixels[0, 0, :, 1, 0], pixels[0, 1, :, 1, 1], atol=0.02)


def test_whitened_convnet_against_float64():
    """Convolutions as sums of shifted images, GELU with the error function, on images of 41 pixels, which leave 5."""
    from scipy.special import erf

    random = np.random.default_rng(0)
    model = model_zoo.create_model("whitened_convnet", 7, 41, seed=3, mean=(120, 110, 100), std=(60, 50, 55))
    for variable in model.variables:
        if len(variable.shape) == 1:  # betas, the first bias, and moving statistics
            variable.assign(random.uniform(0.5, 2, variable.shape))
    pixels = random.integers(0, 256, (2, 41, 41, 3)).astype(np.float64)
    variables = {}
    for layer in model.layers:
        variables.setdefault(type(layer).__name__, []).append([v.numpy().astype(np.float64) for v in layer.weights])

    def convolved(x, kernel, edge):
        x = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
        rows, columns = (x.shape[axis] - kernel.shape[0] + 1 for axis in (1, 2))
        return sum(x[:, i:i + rows, j:j + columns] @ kernel[i, j] for i, j in np.ndindex(*kernel.shape[:2]))

    def pooled(x, window):
        side = x.shape[1] // window * window
        x = x[:, :side, :side].reshape(len(x), side // window, window, side // window, window, -1)
        return x.max(axis=(2, 4))

    def gelu(x):
        return x * (1 + erf(x / np.sqrt(2))) / 2

    [[kernel, bias]] = variables["Whitening"]
    x = gelu(convolved((pixels - (120, 110, 100)) / (60, 50, 55), kernel, 0) + bias)
    for number, ([kernel], [beta, mean, variance]) in enumerate(
            zip(variables["Conv2D"], variables["BatchNormalization"], strict=True)):
        x = convolved(x, kernel, 1)
        x = pooled(x, 2) if number % 2 == 0 else x
        x = gelu((x - mean) / np.sqrt(variance + 1e-5) + beta)
    assert x.shape == (2, 5, 5, 256)
    [[last]] = variables["Dense"]
    expected = pooled(x, 3).reshape(2, -1) @ last / 256
    assert np.abs(model(pixels.astype(np.float32)) - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("side", [7, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_a_convolution_pads_all_sides_equally(kernel, stride, side):
    """Against TensorFlow's own explicit padding, as Caffe and PyTorch pad."""
    from model_zoo.resnet import _Builder

    images = tf.random.stateless_normal([2, side, side, 3], [0, 1])
    inputs = tf.keras.Input([side, side, 3])
    model = tf.keras.Model(inputs, _Builder(0.9, 0).convolution(inputs, 4, kernel, stride))
    edge = [(kernel - 1) // 2] * 2
    expected = tf.nn.conv2d(images, model.trainable_variables[0], stride, [[0, 0], edge, edge, [0, 0]])
    np.testing.assert_allclose(model(images), expected, rtol=1e-5, atol=1e-5)


def test_only_strided_convolutions_need_a_padding_of_their_own():
    """A GPU passes over memory once more for each; in ResNet-50: the stem, its pooling, three bottlenecks."""
    assert sum(isinstance(layer, tf.keras.layers.ZeroPadding2D) for layer in built("resnet50").layers) == 5


@pytest.mark.trainings
def test_where_v1_and_v15_stride():
    def strided(name):
        return sorted(layer.kernel_size for layer in built(name).layers
                      if isinstance(layer, tf.keras.layers.Conv2D) and layer.strides == (2, 2))

    assert strided("resnet50") == [(1, 1)] * 3 + [(3, 3)] * 3 + [(7, 7)]  # projections, bottlenecks, stem
    assert strided("resnet50_v1") == strided("resnet50_nvcaffe") == [(1, 1)] * 6 + [(7, 7)]


@pytest.mark.parametrize(("name", "last_gamma", "branches"), [
    ("resnet18", None, 8), ("resnet50", None, 16), ("resnet50", 1.0, 0), ("resnet50_v1", None, 0),
    ("resnet50_nvcaffe", None, 0), ("resnet20", 0.0, 9)])
def test_residual_branches_end_in_a_zero_gamma(name, last_gamma, branches):
    model = built(name) if last_gamma is None else model_zoo.create_model(name, 10, 64, last_gamma=last_gamma)
    gammas = [v for v in model.trainable_variables if "gamma" in v.name]
    assert sum(bool((v.numpy() == 0).all()) for v in gammas) == branches
    assert not any("bias" in v.name and "dense" not in v.name for v in model.trainable_variables)


def test_alexnet_starts_with_the_norms_of_the_papers_table_4():
    """arXiv:1708.03888, table 4: x.1 is the weight and x.0 the bias, whatever its caption says."""
    norms = {v.name.split(":")[0]: float(tf.norm(v)) for v in built("alexnet").trainable_variables}
    table = {"conv1": (1.86, 0.098), "conv2": (5.546, 0.16), "conv3": (9.40, 0.196), "conv4": (8.15, 0.196),
             "conv5": (6.65, 0.16), "fc6": (30.7, 6.4), "fc7": (20.5, 6.4), "fc8": (20.2, 0.316)}
    for layer, (weight, bias) in table.items():
        assert norms[f"{layer}/kernel"] == pytest.approx(weight, rel=0.01), layer
        assert norms[f"{layer}/bias"] == pytest.approx(bias, rel=0.01), layer


def photographs(count: int) -> np.ndarray:
    """Crops of the two photographs that scikit-learn ships as JPEG, mirrored at random; uint8 (count, 227, 227, 3)."""
    from sklearn.datasets import load_sample_images

    random, crops = np.random.default_rng(0), []
    images = load_sample_images().images
    for number in range(count):
        image = images[number % len(images)]
        top, left = random.integers(0, image.shape[0] - 227), random.integers(0, image.shape[1] - 227)
        crop = image[top:top + 227, left:left + 227]
        crops.append(crop[:, ::-1] if random.random() < 0.5 else crop)
    return np.stack(crops)


@pytest.mark.trainings
def test_alexnets_first_gradients_have_the_norms_of_table_4():
    """arXiv:1708.03888: batch 4,096, first iteration. Within a factor of 3, as these are not ImageNet's photographs.

    512 labels on 64 crops, which is what one of the paper's eight GPUs has of it: a network that knows nothing has
    gradients that fall with the square root of the batch, and with all 4,096 labels those of the first three layers are
    0.13 to 0.30 of the table's, of the others 0.35 to 0.73.
    """
    images, random = photographs(64), np.random.default_rng(1)
    labels = tf.reduce_mean(tf.one_hot(random.integers(0, 1000, (64, 8)), 1000), axis=1)
    model = model_zoo.create_model("alexnet", 1000, 227, seed=1, mean=images.mean(axis=(0, 1, 2)), std=(58.0,) * 3)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, model(images, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    norms = {v.name.split(":")[0]: float(tf.norm(g)) for v, g in zip(model.trainable_variables, gradients, strict=True)}
    table = {"conv1": 0.22, "conv2": 0.165, "conv3": 0.135, "conv4": 0.109, "conv5": 0.09, "fc6": 0.26, "fc7": 0.30,
             "fc8": 0.22}
    for layer, norm in table.items():
        assert norm / 3 < norms[f"{layer}/kernel"] < 3 * norm, (layer, norms)


@pytest.mark.parametrize(("name", "scale"), [
    ("alexnet", 1.0), ("alexnet_bn", 1 / 256), ("alexnet_bn5", 1 / 256), ("resnet50_nvcaffe", 1 / 256),
    ("resnet50", 1 / 50), ("convnet", 1 / 50)])
def test_pixels_are_scaled_as_the_model_wants_them(name, scale, monkeypatch):
    """A network that returns what it gets stands for the model's own."""
    info = model_zoo.MODELS[name]
    monkeypatch.setattr(importlib.import_module(info.module), info.function, lambda pixels, **_: pixels)
    model = model_zoo.create_model(name, 10, 67, mean=(100.0, 110.0, 120.0), std=(50.0,) * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 67, 67, 3)).astype(np.float32)
    np.testing.assert_allclose(model(pixels), (pixels - [100, 110, 120]) * scale, rtol=1e-5, atol=1e-5)


def test_the_norms_of_the_authors_two_alexnets():
    """Of which nvcaffe's solvers for LARS name the second, train_val2."""
    def described(name):
        model = built(name)
        norms = [layer for layer in model.layers if isinstance(layer, tf.keras.layers.BatchNormalization)]
        before = [type(layer.input._keras_history.layer).__name__ for layer in norms]
        biases = {v.name.split("/")[0]: float(v.numpy()[0]) for v in model.trainable_variables if "bias" in v.name}
        return before, [(one.epsilon, one.scale, one.center) for one in norms], biases

    before, norms, biases = described("alexnet_bn")
    assert before == ["MaxPooling2D", "MaxPooling2D", "ReLU", "ReLU"] and norms == [(1e-4, False, False)] * 4
    assert biases == pytest.approx({f"conv{n}": 0.01 for n in range(1, 6)} | {"fc6": 0.1, "fc7": 0.1, "fc8": 0.01})
    before, norms, biases = described("alexnet_bn5")
    assert before == ["Conv2D"] * 5 and norms == [(1e-4, True, True)] * 5
    assert biases == pytest.approx({"conv5": 0.1, "fc6": 0.1, "fc7": 0.1, "fc8": 0.0})


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


@pytest.mark.trainings
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.campaign if name.startswith(("resnet101", "resnet152")) else ())
    for name in (*model_zoo.ZOO, "keras:MobileNetV3Small")])
def test_two_steps_move_the_weights(name):
    assert two_steps(name, SMALLEST.get(name, 32), batch=4) > 0.7  # a zero gamma holds back what is behind it


@pytest.mark.trainings
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


def test_dropout_is_a_function_of_seed_and_position():
    inputs = tf.keras.Input((9, 11))

    def masked(seed, position, samples=64):
        model = tf.keras.Model(inputs, Dropout(0.4, seed)(inputs))
        with masks_at(model, tf.constant(position, tf.int64)):
            return model(tf.ones((samples, 9, 11)), training=True).numpy()

    first = masked(7, 128)
    np.testing.assert_array_equal(first, np.concatenate([masked(7, 128, 40), masked(7, 168, 24)]))
    assert all((first != other).mean() > 0.3 for other in (masked(7, 0), masked(7, 129), masked(8, 128)))
    assert first.mean() == pytest.approx(1, abs=0.05) and set(np.unique(first)) == {0, np.float32(1 / 0.6)}


@pytest.mark.parametrize(("name", "blocks"), [
    ("resnet20", 9), ("resnet10_narrow", 4), ("resnet50", 16),
    pytest.param("resnet50_nvcaffe", 16, marks=pytest.mark.trainings)])
def test_stochastic_depth_is_linear_over_the_blocks(name, blocks):
    """It drops what the last norm of a branch returns. The weights are the same, and at 0 the graph is, too."""
    plain, info = built(name), model_zoo.MODELS[name]
    none, model = (model_zoo.create_model(name, 1000, info.image_size, drop_path=rate) for rate in (0.0, 0.6))
    kinds = [[type(layer) for layer in one.layers] for one in (plain, none)]
    assert kinds[0] == kinds[1] and Dropout not in kinds[0]
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    depths = [layer for layer in model.layers if isinstance(layer, Dropout)]
    assert len(depths) == blocks - 1  # the first block is always whole
    ones, dropped, masks = tf.ones((4000, 2, 2, 3)), [], []
    with masks_at(model, tf.constant(100, tf.int64)):
        for depth in depths:
            branch, _ = depth.inbound_nodes[0].inbound_layers
            assert isinstance(branch, BatchNormalization)
            np.testing.assert_array_equal(depth([ones, ones], training=False), 2 * ones)
            masks.append(depth([ones, ones], training=True).numpy() - 1)
            assert (masks[-1] == masks[-1][:, :1, :1, :1]).all()  # whole samples
            dropped.append((masks[-1][:, 0, 0, 0] == 0).mean())
            assert masks[-1].max() == pytest.approx(1 / (1 - depth._rate))
    rates = 0.6 * np.arange(1, blocks) / (blocks - 1)
    np.testing.assert_allclose(dropped, rates, atol=0.03)
    flat = np.array(masks)[..., 0, 0, 0] > 0
    assert np.abs(np.corrcoef(flat) - np.eye(blocks - 1)).max() < 0.1  # each block has its own
    with masks_at(model, tf.constant(700, tf.int64)):
        later = depths[-1]([ones[:50], 0 * ones[:50]], training=True)
    np.testing.assert_array_equal(later, masks[-1][600:650])  # by position


def test_dropout_elsewhere_is_as_in_keras():
    """In a user's own `fit`, each call has another mask, and none has one in inference."""
    ones, layer = tf.ones((64, 100)), Dropout(0.4, 7)
    assert (layer(ones, training=True).numpy() != layer(ones, training=True).numpy()).mean() > 0.3
    np.testing.assert_array_equal(layer(ones, training=False), ones)
