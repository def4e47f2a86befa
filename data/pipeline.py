"""The DALI pipeline: reader -> decode -> augment -> batch. CPU and GPU use the same graph.

Importing this module does not import DALI.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.augmentation import COLUMNS, Augmentation
from data.formats import tfrecord

STAGES = ("read", "decode", "augment")
GREY = 128.0  # about which contrast changes
NOISE_MARGIN = 64  # pixels by which the fixed noise field exceeds the image; each image adds a random window of it


@dataclass(frozen=True)
class DecoderSettings:
    """The device that decodes and augments images. name: "cpu" or "gpu". number: index of the GPU, None on a CPU.

    threads: number of DALI threads. hw_decoder_load: fraction of the images that the GPU's hardware decoder decodes, if
    there is one. upload: the TensorFlow device to which batches from a CPU are prefetched, or None. mmap: whether files
    are mapped into memory, auto (unless they are on a network file system), true or false.
    """

    name: str = "cpu"
    number: int | None = None
    threads: int = 2
    hw_decoder_load: float = 0.65
    upload: str | None = None
    mmap: str = "auto"

    @property
    def decoder(self) -> dict:
        return {"device": "mixed", "hw_decoder_load": self.hw_decoder_load} if self.name == "gpu" else {}


def build_pipeline(read, read_numbers=None, read_mixing=None, *, batch_size: int, image_size: int,
                   augmentation: Augmentation, first_label: int, device: DecoderSettings, until: str = "augment"):
    """Builds the pipeline over the samples that `read` returns, in their order, repeated endlessly.

    read, read_numbers, read_mixing: functions that add a reader to the graph. `read` returns (encoded image, label).
        `read_numbers` returns each sample's augmentation.random_numbers, or is None if nothing is random. `read_mixing`
        returns each sample's row of Mixing.random_numbers, or is None if images are not mixed.
    until: the last of STAGES. "read" returns encoded images, "decode" images of different sizes.
    Outputs: images uint8 (batch, image_size, image_size, 3), RGB; labels int64 (batch, 1), from 0; with `read_mixing`,
        its rows.
    """
    from nvidia.dali import Pipeline

    pipeline = Pipeline(batch_size=batch_size, num_threads=device.threads, device_id=device.number, seed=0)
    with pipeline:
        encoded, label = read()
        columns = read_numbers and by_name(read_numbers())
        if until == "read":
            images = encoded
        elif until == "decode":
            images = decoded(encoded, columns, augmentation, device)
        else:
            images = augmented(encoded, columns, image_size, augmentation, device)
        outputs = [label - first_label, *([read_mixing()] if read_mixing else [])]
        pipeline.set_outputs(images, *(one.gpu() if device.name == "gpu" else one for one in outputs))
    return pipeline


def augmented(encoded, columns: dict | None, image_size: int, augmentation: Augmentation, device: DecoderSettings):
    """Adds decoding, resizing and augmentation to the graph; returns uint8 images. columns: random numbers by name.

    Resizing is bilinear without antialiasing, as in Caffe's and TensorFlow's recipes. On a CPU, this saves a third of
    the whole pipeline's time.
    """
    from nvidia.dali import fn, types

    images = decoded(encoded, columns, augmentation, device)
    if columns and augmentation.warp:
        return _warped(images, fn.peek_image_shape(encoded), columns, image_size, device)
    images = fn.resize(images, size=(image_size, image_size), antialias=False)
    if columns and augmentation.flip:
        images = fn.flip(images, horizontal=_as_int(columns["mirror"]))
    if columns and augmentation.colour:
        colour = columns["colour"].gpu() if device.name == "gpu" else columns["colour"]
        images = fn.cast(images + fn.reshape(colour, shape=[1, 1, 3]), dtype=types.UINT8)
    return images


def decoded(encoded, columns, augmentation, device):
    """Decodes only the crop of each image, if the image format allows partial decoding.

    peek_image_shape always runs first, because it raises an error for a damaged header. DALI 2.4's decoders can crash
    on one.
    """
    from nvidia.dali import fn, types

    shape = fn.peek_image_shape(encoded)
    if columns and augmentation.warp:
        return fn.decoders.image(encoded, output_type=types.RGB, **device.decoder)
    anchor, size = crop_window(fn.cast(shape[0:2], dtype=types.FLOAT), columns, augmentation)
    return fn.decoders.image_slice(encoded, _as_int(anchor), _as_int(size), axis_names="HW", output_type=types.RGB,
                                   **device.decoder)


def crop_window(sides, columns, augmentation):
    """Returns the upper left corner and the size of the crop, for images of `sides`; all (height, width).

    With `area`, the aspect ratio is sampled first, then the area among those that fit, as in TensorFlow's
    sample_distorted_bounding_box. There are no retries, so that the crop is a function of the sample's numbers.
    Without it, the crop is a square of the shorter side / `enlarge`, or / a divisor sampled from `rescale`.
    """
    from nvidia.dali import math

    height, width = sides[0], sides[1]
    if columns and augmentation.area:
        room = sides / columns["sides"]
        largest = math.min(math.pow(math.min(room[0], room[1]), 2) / (height * width), augmentation.area[1])
        area = math.min(largest, augmentation.area[0] + (largest - augmentation.area[0]) * columns["area"])
        size = math.sqrt(area * height * width) * columns["sides"]
    else:
        enlarge = augmentation.enlarge
        if columns and augmentation.rescale:
            low, high = augmentation.rescale
            enlarge = low + (high - low) * columns["area"]
        size = math.min(height, width) / enlarge + sides * 0
    size = math.clamp(math.floor(size + 0.5), 1, sides)
    offset = columns["offset"] if columns and (augmentation.area or augmentation.shift) else 0.5
    return math.floor((sides - size) * offset + 0.5), size


def _warped(images, shape, columns, image_size, device):
    """Resamples images of this shape once, as augmentation.random_numbers describes, and changes their colours."""
    from nvidia.dali import fn, math, types

    sides = fn.cast(shape[0:2], dtype=types.FLOAT)
    pixel = math.min(sides[0], sides[1]) / columns["shorter"]  # of the scaled image, in pixels of the image
    left = math.max(sides - columns["reach"] * pixel, 0.0)
    centre = sides / 2 + left * (columns["offset"] - 0.5)
    rows = [(columns["warp"][row] * pixel, columns["warp"][row + 1] * pixel) for row in (0, 2)]
    moved = [centre[axis] - (a + b) * (image_size / 2) for axis, (a, b) in zip((1, 0), rows, strict=True)]
    matrix = fn.reshape(fn.stack(*rows[0], moved[0], *rows[1], moved[1]), shape=[2, 3])
    images = fn.warp_affine(images, matrix=matrix, size=(image_size, image_size), inverse_map=True,
                            dtype=types.FLOAT)  # without fill_value, the border is repeated
    brightness, contrast, noise = (
        fn.reshape(columns[name], shape=[1, 1, -1]) for name in ("brightness", "contrast", "noise"))
    field = np.random.Generator(np.random.Philox(0)).standard_normal((image_size + NOISE_MARGIN,) * 2 + (3,))
    field = types.Constant(field.astype(np.float32), layout="HWC", device=device.name)
    window = fn.slice(field, start=_as_int(columns["noise_offset"] * NOISE_MARGIN), shape=[image_size, image_size],
                      axes=[0, 1])
    if device.name == "gpu":
        brightness, contrast, noise = brightness.gpu(), contrast.gpu(), noise.gpu()
    return fn.cast((images + (brightness - GREY)) * contrast + GREY + window * noise, dtype=types.UINT8)


def matrix_reader(rows: np.ndarray, scratch: Path, name: str = "numbers"):
    """Writes a float32 matrix as TFRecords. Returns a function that adds their reader to the graph: a row per sample.

    name: of the file in `scratch` and of the feature. The records differ only in their numbers, so NumPy writes all of
    them as one structured array. The checksums stay 0, because DALI does not check them.
    """
    import tensorflow as tf

    width = rows.shape[1]
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=rows[0]))
    example = tf.train.Example(features=tf.train.Features(feature={name: feature})).SerializeToString()
    start = example.index(rows[0].tobytes())
    layout = np.dtype([("length", "<u8"), ("length_crc", "<u4"), ("head", f"S{start}"), ("row", "<f4", (width,)),
                       ("data_crc", "<u4")])
    file = np.zeros(len(rows), layout)
    file["length"], file["head"], file["row"] = len(example), example[:start], rows
    file.tofile(scratch / name)
    offsets = np.arange(len(rows)) * layout.itemsize
    entries = np.stack([offsets, np.full(len(rows), layout.itemsize)], axis=1)
    tfrecord.index_lines(entries).tofile(scratch / f"{name}.idx")

    def read():
        from nvidia.dali import fn
        from nvidia.dali.tfrecord import FixedLenFeature, float32

        return fn.readers.tfrecord(path=[str(scratch / name)], index_path=[str(scratch / f"{name}.idx")],
                                   features={name: FixedLenFeature([width], float32, 0.0)})[name]

    return read


def by_name(numbers) -> dict:
    """Splits the columns of augmentation.random_numbers by name. Columns of width 1 become scalars."""
    columns, start = {}, 0
    for name, width in COLUMNS.items():
        columns[name] = numbers[start] if width == 1 else numbers[start:start + width]
        start += width
    return columns


def _as_int(numbers):
    from nvidia.dali import fn, types

    return fn.cast(numbers, dtype=types.INT32)
