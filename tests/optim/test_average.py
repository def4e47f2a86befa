"""The moving average of the weights, against a float64 recursion."""
import numpy as np
import pytest
import tensorflow as tf

import model_zoo
from optim.average import WeightAverage


@pytest.fixture
def model():
    return model_zoo.create_model("resnet20", 3, 8, seed=2)


def shifted(model, amount):
    for variable in model.variables:
        if variable.dtype.is_floating:
            variable.assign_add(tf.fill(variable.shape, amount))


def test_against_the_recursion(model):
    """Batches of 64 decay by 0.9, one of 192 by 0.9 ** 3."""
    average = WeightAverage(model, 0.9, batch_size=64)
    floating = [variable for variable in model.variables if variable.dtype.is_floating]
    expected = [variable.numpy().astype(np.float64) for variable in floating]
    for amount, batch_size in ((0.5, 64), (-1.0, 64), (0.25, 192)):
        shifted(model, amount)
        average.update(batch_size)
        decay = 0.9 ** (batch_size // 64)
        expected = [decay * old + (1 - decay) * new.numpy() for old, new in zip(expected, floating, strict=True)]
    assert len(expected) == len(average.variables) == 97  # 20 kernels and a bias, 19 batch norms of four
    for one, other in zip(average.variables, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_swapped_in_and_back(model):
    average = WeightAverage(model, 0.5, batch_size=1, moving_statistics=False)
    initial = [variable.numpy() for variable in average.variables]
    shifted(model, 1.0)
    weights = model.get_weights()
    with pytest.raises(KeyError), average.swapped_in():
        for variable, value in zip(model.variables, initial, strict=True):
            np.testing.assert_array_equal(variable, value)
        model.layers[3].moving_mean.assign(tf.fill(model.layers[3].moving_mean.shape, 7.0))  # measured under it
        raise KeyError
    for variable, value in zip(model.variables, weights, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert sum(np.all(variable.numpy() == 7.0) for variable in average.variables) == 1


def test_statistics_that_are_measured_are_not_averaged(model):
    average = WeightAverage(model, 0.5, batch_size=1, moving_statistics=False)
    shifted(model, 1.0)
    before = {variable.name: variable.numpy() for variable in average.variables if "moving" in variable.name}
    average.update(1)
    after = {variable.name: variable.numpy() for variable in average.variables}
    assert len(before) == 38
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    assert any((after[name] != variable.numpy()).any() for name, variable in (
        (variable.name, variable) for variable in model.trainable_variables))
