"""Models: parameter counts against published figures, output shapes, registry."""
import pytest

import model_zoo


@pytest.mark.parametrize("name", model_zoo.MODELS)
def test_logits(name):
    info = model_zoo.MODELS[name]
    model = model_zoo.create_model(name, 7, info.image_size)
    assert model.output_shape == (None, 7) and model.output.dtype == "float32"


def test_resnet20_has_its_published_size():
    """0.27 million parameters (arXiv:1512.03385, table 6), by hand for 10 classes.

    Convolutions 432 + 6 * 2304 + (4608 + 5 * 9216) + (18432 + 5 * 36864), gamma and beta of 7 norms of 16, 6 of 32
    and 6 of 64 channels, dense 640 + 10.
    """
    model = model_zoo.create_model("resnet20", 10, 32)
    trainable = sum(v.shape.num_elements() for v in model.trainable_variables)
    assert trainable == 432 + 13824 + 50688 + 202752 + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 650 == 269722
    assert sum(len(v.shape) == 4 for v in model.trainable_variables) == 19


def test_the_seed_makes_the_weights():
    def kernels(seed):
        return [w.tobytes() for w in model_zoo.create_model("resnet20", 10, 32, seed=seed).get_weights() if w.ndim > 1]

    assert kernels(3) == kernels(3)
    assert not set(kernels(3)) & set(kernels(4))
