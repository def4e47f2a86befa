import json

import pytest
from conftest import run

import model_zoo
from model_zoo import cost
from model_zoo.layers import BatchNormalization


@pytest.mark.parametrize("name, parameters, multiply_adds", [
    ("resnet18", 11_689_512, 1.8e9), ("resnet50_v1", 25_557_032, 3.8e9),
    pytest.param("resnet152_v1", 60_192_808, 11.3e9, marks=pytest.mark.campaign),
    ("alexnet", 60_965_224, 0.72e9)])
def test_what_is_printed_of_models(name, parameters, multiply_adds):
    """Multiply-adds: arXiv:1512.03385, table 1; AlexNet's are Caffe's. Parameters: torchvision's and Caffe's."""
    counted = cost.model_cost(name, 1000, model_zoo.MODELS[name].image_size)
    assert counted.parameters == parameters
    assert counted.multiply_adds == pytest.approx(multiply_adds, rel=0.02)


def test_what_is_counted_of_a_network_with_a_kernel_that_is_not_trained():
    """By hand: positions times the kernel's elements; 6 norms; 6 betas, 7 kernels and a bias. Pooling leaves 15, 7, 3.
    """
    counted = cost.model_cost("whitened_convnet", 10, 32)
    operations = 961 * (288 + 9 * 24 * 64) + 225 * 9 * 64 * (64 + 256) + 49 * 9 * 256**2 * 2 + 9 * 9 * 256**2 + 2560
    assert counted == cost.ModelCost(1_971_352, 14, operations, 2 * (2 * 64 + 4 * 256), last_layer=2560,
                                     name="whitened_convnet")


def test_resnet50_is_known_without_building_it(monkeypatch):
    known = cost.model_cost("resnet50", 1000, 224)
    monkeypatch.setattr(cost, "RESNET50", None)
    model = model_zoo.create_model("resnet50", 1000, 224)
    assert (known.parameters, known.variables, known.last_layer) == (
        sum(v.numpy().size for v in model.trainable_variables), len(model.trainable_variables), 2048 * 1000 + 1000)
    built = cost.model_cost("resnet50", 1001, 224)  # a class more: 2,048 more weights, each used once, and a bias
    assert (built.parameters - 2049, built.multiply_adds - 2048) == (known.parameters, known.multiply_adds)


def test_a_network_counted_by_hand(monkeypatch):
    """A grouped convolution to 4x4 positions, in a nested model, and a dense layer."""
    import tensorflow as tf

    images = tf.keras.Input((8, 8, 4))
    x = tf.keras.Sequential([tf.keras.layers.Conv2D(6, 3, 2, "same", groups=2)])(images)
    model = tf.keras.Model(images, tf.keras.layers.Dense(10)(tf.keras.layers.Flatten()(x)))
    monkeypatch.setattr(model_zoo, "create_model", lambda *_: model)
    assert cost.model_cost("alexnet", 10, 8) == cost.ModelCost(
        parameters=3 * 3 * 2 * 6 + 6 + 96 * 10 + 10, variables=4, multiply_adds=16 * 3 * 3 * 2 * 6 + 96 * 10,
        last_layer=96 * 10 + 10)


def test_the_values_that_the_backward_pass_needs_counted_by_hand(monkeypatch):
    """The images, the inputs of batch norm, the outputs of ReLU, and their means; in a nested model."""
    import tensorflow as tf

    def create(*_):
        images = tf.keras.Input((8, 8, 3))
        x = tf.keras.Sequential([tf.keras.layers.Conv2D(4, 1, use_bias=False), BatchNormalization(),
                                 tf.keras.layers.ReLU()])(images)
        return tf.keras.Model(images, tf.keras.layers.Dense(5)(tf.keras.layers.GlobalAveragePooling2D()(x)))

    monkeypatch.setattr(model_zoo, "create_model", create)
    kept, parameters = 64 * 3 + 64 * 4 + 64 * 4 + 4, 3 * 4 + 4 + 4 + 4 * 5 + 5
    per_image, fixed = cost.training_memory("alexnet", 8, 2)
    assert per_image == pytest.approx(2 * kept, rel=0.05) and fixed == 16 * parameters


def test_resnet50_takes_what_was_measured():
    """About 85 MB per image in float32, at 224 pixels; a quarter of the pixels and half of the bytes take an eighth."""
    per_image, fixed = cost.training_memory("resnet50", 224, 4)
    assert per_image == pytest.approx(85e6, rel=0.1) and fixed == pytest.approx(25.6e6 * 16, rel=0.01)
    assert cost.training_memory("resnet50", 112, 2)[0] == per_image / 8


# Prints the peak of what TensorFlow's allocator has given out in an update, for each number of images.
MEASURE = """
import json, sys
import horovod.tensorflow as hvd, numpy as np, tensorflow as tf
import model_zoo, optim
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from model_zoo.layers import trained_variables
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step

hvd.init()
name, size, freeze, peaks = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", []
model = model_zoo.create_model(name, 1000, size)
optimizer = wrap(optim.create_optimizer(
    "sgd", 0.0, momentum=0.9, weight_decay=0.0, trust_coefficient=0.0, epsilon=0.0, exclude=()))
build(optimizer, trained_variables(model, freeze))
step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), freeze=freeze))
for images in (8, 40):
    batch = np.zeros((images, size, size, 3), np.uint8), np.zeros((images, 1), np.int64)
    batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
    for _ in range(2):  # in the first, TensorFlow also optimizes the graph
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(batches, StepInput.of(0.0, 0.0))
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
print(json.dumps(peaks))
"""


@pytest.mark.parametrize(("name", "size", "freeze"), [
    ("resnet20", 64, False), ("resnet20", 64, True),
    pytest.param("keras:MobileNetV3Small", 224, True, marks=pytest.mark.trainings)])
def test_an_image_takes_what_the_allocator_gives_out(name, size, freeze, monkeypatch):
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "true")
    done = run("python", 1, "-c", MEASURE, name, size, freeze)
    assert done.returncode == 0, done.stderr
    few, many = json.loads(done.stdout)
    assert cost.training_memory(name, size, 4, freeze)[0] == pytest.approx((many - few) / 32, rel=0.2)


def test_a_frozen_parameter_takes_its_weight_alone():
    """Of ResNet-50, 2,048 x 1,000 weights and 1,000 biases are trained."""
    assert cost.training_memory("resnet50", 224, 4, freeze=True)[1] == 4 * 25_557_032 + 12 * 2_049_000


@pytest.mark.campaign
@pytest.mark.parametrize("freeze", [False, True])
def test_resnet50s_stored_memory_is_that_of_the_model(freeze, monkeypatch):
    stored = cost.training_memory("resnet50", 224, 4, freeze)
    monkeypatch.setattr(cost, "is_known", lambda name: False)
    assert cost.training_memory("resnet50", 224, 4, freeze) == stored
