"""The SavedModel of a trained model: encoded images in, class names and probabilities out."""
import shutil
from pathlib import Path

import tensorflow as tf

from inference.preprocessing import preprocess
from inference.trained import TOP, Trained
from model_zoo.layers import input_numbers

IMAGES = tf.TensorSpec([None], tf.string, "image_bytes")


class Classifier(tf.Module):
    """What is saved. Its functions take encoded images, string (batch,): JPEG, PNG or GIF.

    They return `classes` (names, string) and `probabilities` (float32), both (batch, classes), the most probable class
    first.
    """

    def __init__(self, trained: Trained):
        super().__init__()
        self._probabilities = trained.probabilities
        # What the functions need has to be an attribute.
        self.weights = [*trained.model.variables, *input_numbers(trained.model)]
        self._size = trained.image_size
        self._enlarge = trained.enlarge
        self._names = [name.encode(errors="surrogateescape") for name in trained.classes]

    @tf.function(input_signature=[IMAGES], autograph=False)
    def classify(self, image_bytes):
        """Returns the five most probable classes."""
        return self._most_probable(image_bytes, min(TOP, len(self._names)))

    @tf.function(input_signature=[IMAGES], autograph=False)
    def classify_all(self, image_bytes):
        """Returns all classes."""
        return self._most_probable(image_bytes, len(self._names))

    def _most_probable(self, image_bytes, count):
        images = tf.map_fn(lambda encoded: preprocess(encoded, self._size, self._enlarge), image_bytes,
                           fn_output_signature=tf.TensorSpec((self._size, self._size, 3), tf.uint8))
        probabilities, labels = tf.math.top_k(self._probabilities(images), count)
        return {"classes": tf.gather(tf.constant(self._names), labels), "probabilities": probabilities}


def write_saved_model(trained: Trained, path: Path) -> None:
    """Writes a SavedModel folder atomically, in place of an earlier one. Raises OSError, tf.errors.OpError."""
    scratch = path.with_name(f"{path.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    classifier = Classifier(trained)
    try:
        tf.saved_model.save(classifier, str(scratch), {
            "serving_default": classifier.classify, "all_classes": classifier.classify_all})
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    scratch.rename(path)
