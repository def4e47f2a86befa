"""The DALI pipeline: reader -> decode -> augment -> batch. CPU and GPU use the same graph.

DALI draws no random numbers. NumPy computes them (data.augmentation, data.mixing), each a function of the seed and of
the sample's position in the stream, so that a sample is augmented alike on any number of workers and after a resume.
DALI then reads them like a second dataset: `matrix_reader` writes one TFRecord per sample into a scratch folder, and a
second reader reads these records side by side with the images. The obvious way, an fn.external_source, calls Python for
every batch. It was slower when it was measured, also with whole batches of numbers.

Importing this module does not import DALI.
"""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.augmentation import Augmentation, by_name
from data.formats import tfrecord
from data.warp import reflected, warped

STAGES = ("read", "decode", "augment")
GREY = 128.0  # about which contrast changes
NOISE_MARGIN = 64  # pixels by which the fixed noise field exceeds the image; each image adds a random part of it


@dataclass(frozen=True)
class DecoderSettings:
    """The device that decodes and augments images, and how."""

    name: str = "cpu"  # "cpu" or "gpu"
    number: int | None = None  # index of the GPU; None on a CPU
    threads: int = 2  # number of DALI threads
    hw_decoder_load: float = 0.65  # fraction of the images for the GPU's hardware decoder, if it has one
    upload: str | None = None  # TensorFlow device to which batches from a CPU are prefetched, or None
    mmap: str = "auto"  # whether files are mapped into memory: true, false, or auto: unless the file system is remote

    @property
    def decoder(self) -> dict:
        return {"device": "mixed", "hw_decoder_load": self.hw_decoder_load} if self.name == "gpu" else {}


class Readers(NamedTuple):
    """Functions that add a reader to the graph. All readers return the same samples in the same order."""

    samples: Callable  # returns (encoded image, label)
    numbers: Callable | None = None  # returns a row of augmentation.random_numbers; None: nothing is random
    mixing: Callable | None = None  # returns a row of Mixing.random_numbers; None: images are not mixed


class Part(NamedTuple):
    """The part of each image that is decoded, as values of the graph: (height, width), in pixels."""

    corner: object  # upper left
    size: object
    rows: tuple | None = None  # (a, b, c) and (d, e, f) of `warped`, to the part's pixels; None: it is resized


@dataclass(frozen=True)
class Transform:
    """What is done to each image after it was read."""

    size: int  # height and width of the result in pixels
    augmentation: Augmentation
    device: DecoderSettings = DecoderSettings()  # decodes and augments it
    mean: tuple[float, float, float] | None = None  # colour of a padding that shows the mean, RGB, 0 to 255

    def on_device(self, tensor):
        """Returns a tensor of the graph on the device of the images."""
        return tensor.gpu() if self.device.name == "gpu" else tensor


def build_pipeline(readers: Readers, transform: Transform, batch_size: int, first_label: int, until: str = "augment"):
    """Builds the pipeline. It returns the samples in the order of the readers, and starts again after the last one.

    Outputs: images, uint8 (batch, size, size, 3), RGB; labels, int64 (batch, 1), from 0; and, if images are mixed, the
    rows of Mixing.random_numbers.

    first_label: the smallest label on disk.
    until: the last of STAGES. "read" returns encoded images, "decode" images of different sizes.
    """
    from nvidia.dali import pipeline_def
    from nvidia.dali.pipeline import do_not_convert

    device = transform.device
    has_operations = bool(readers.numbers and transform.augmentation.operations and until == "augment")

    def read_and_transformed():
        encoded, label = readers.samples()
        columns = readers.numbers and by_name(transform.augmentation, readers.numbers())
        if until == "read":
            images = encoded
        else:
            images = augmented(encoded, columns, transform) if until == "augment" else (
                decoded(encoded, used_part(encoded, columns, transform), transform))
        others = [label - first_label, *([readers.mixing()] if readers.mixing else [])]
        return columns, images, *map(transform.on_device, others)

    @pipeline_def(enable_conditionals=has_operations)
    def graph():
        columns, images, *others = do_not_convert(read_and_transformed)()  # only operations have conditionals
        if has_operations:
            for operation in transform.augmentation.operations:
                images = operation.applied(images, columns[operation], transform)
        return images, *others

    return graph(batch_size=batch_size, num_threads=device.threads, device_id=device.number, seed=0)


def augmented(encoded, columns: dict | None, transform: Transform):
    """Adds decoding, resizing and augmentation to the graph; returns uint8 images.

    columns: random numbers by name (data.augmentation.by_name); None: nothing is random.
    """
    from nvidia.dali import fn, types

    part = used_part(encoded, columns, transform)
    images = decoded(encoded, part, transform)
    if part.rows:
        return _distorted(images, part.rows, columns, transform)
    mirror = columns["mirror"] if columns and transform.augmentation.flip else None
    images = _resized(images, part.size, mirror, transform)
    if columns and transform.augmentation.padding:
        images = _padded(images, columns["corner"], transform)
    if columns and transform.augmentation.colour:
        colour = fn.reshape(transform.on_device(columns["colour"]), shape=[1, 1, 3])
        images = fn.cast(images + colour, dtype=types.UINT8)
    return images


def used_part(encoded, columns: dict | None, transform: Transform) -> Part:
    """Returns the part of each image that the result needs.

    peek_image_shape raises an error for a damaged header, on which DALI 2.4's decoders can crash.
    """
    from nvidia.dali import fn, types

    sides = fn.cast(fn.peek_image_shape(encoded)[0:2], dtype=types.FLOAT)
    if columns and transform.augmentation.warp:
        return _shown(sides, columns, transform.size)
    return Part(*crop(sides, columns, transform.augmentation))


def decoded(encoded, part: Part, transform: Transform):
    """Decodes the part of each image alone, if the image format allows it."""
    from nvidia.dali import fn, types

    return fn.decoders.image_slice(encoded, _as_int(part.corner), _as_int(part.size), axis_names="HW",
                                   output_type=types.RGB, **transform.device.decoder)


def _resized(images, sides, mirror, transform):
    """Resizes images to the size of the result, and mirrors those whose `mirror` is 1.

    sides: height and width of each image. mirror: 0 or 1 for each image; None: no image is mirrored.

    Resizing is bilinear without antialiasing, as in Caffe's and TensorFlow's recipes. On a CPU, the warp does both in
    less than half of the time of fn.resize and fn.flip. Its pixels differ from theirs by 1 in about one value of
    10,000.
    """
    from nvidia.dali import fn

    size = transform.size
    if transform.device.name == "gpu":
        images = fn.resize(images, size=(size, size), antialias=False)
        return images if mirror is None else fn.flip(images, horizontal=_as_int(mirror))
    scale = sides / size
    row = (scale[1], 0.0, 0.0) if mirror is None else (scale[1] * (1 - 2 * mirror), 0.0, sides[1] * mirror)
    return warped(images, row, (0.0, scale[0], 0.0), size)


def _padded(images, corner, transform):
    """Returns the crops of padded images at `corner`, a column of augmentation.columns. Nothing is resampled."""
    from nvidia.dali import fn

    size, filling = transform.size, transform.augmentation.filling
    if filling == "reflect":
        return reflected(images, corner, size)
    colour = np.round(transform.mean).tolist() if filling == "mean" else 0.0
    return fn.slice(images, start=_as_int(corner), shape=[size, size], axes=[0, 1], out_of_bounds_policy="pad",
                    fill_values=colour)


def decoder(augmentation: Augmentation, batch_size: int = 2, threads: int = 1):
    """Builds a pipeline that decodes the images given to its input `encoded` on the CPU.

    batch_size: number of images at a time, at most.
    """
    from nvidia.dali import Pipeline, fn

    pipeline = Pipeline(
        batch_size=batch_size, num_threads=threads, device_id=None, exec_async=False, exec_pipelined=False)
    with pipeline:
        encoded, transform = fn.external_source(name="encoded"), Transform(0, augmentation)
        pipeline.set_outputs(decoded(encoded, used_part(encoded, None, transform), transform))
    pipeline.build()
    return pipeline


def crop(sides, columns, augmentation):
    """Returns the upper left corner and the size of the crop, for images of `sides`; all (height, width).

    With `area`, the aspect ratio is sampled first, then the area among those that fit, as in TensorFlow's
    sample_distorted_bounding_box. There are no retries, so that the crop is a function of the sample's numbers.
    Without `area`, the crop is a square whose side is the shorter side divided by `enlarge`, or by a number sampled
    from `rescale`. If `enlarge` is None, the crop is computed for a square image and then stretched to this one.
    """
    from nvidia.dali import math

    shorter = math.min(sides[0], sides[1])
    frame = sides * 0 + shorter if augmentation.enlarge is None else sides
    height, width = frame[0], frame[1]
    if columns and augmentation.area:
        room = frame / columns["sides"]
        least, most = augmentation.area
        largest = math.min(math.pow(math.min(room[0], room[1]), 2) / (height * width), most)
        area = math.min(largest, least + (largest - least) * columns["area"])
        size = math.sqrt(area * height * width) * columns["sides"]
    else:
        enlarge = augmentation.enlarge or 1.0
        if columns and augmentation.rescale:
            low, high = augmentation.rescale
            enlarge = low + (high - low) * columns["area"]
        size = shorter / enlarge + frame * 0
    size = math.clamp(math.floor(size * (sides / frame) + 0.5), 1, sides)
    offset = columns["offset"] if columns and (augmentation.area or augmentation.shift) else 0.5
    return math.floor((sides - size) * offset + 0.5), size


def _shown(sides, columns, size: int) -> Part:
    """Returns the part of images of `sides` that a result of size x size shows, as augmentation.random_numbers has it.
    """
    from nvidia.dali import fn, math

    pixel = math.min(sides[0], sides[1]) / columns["shorter"]  # of the scaled image, in pixels of the image
    left = math.max(sides - columns["reach"] * pixel, 0.0)
    centre = sides / 2 + left * (columns["offset"] - 0.5)
    (a, b), (d, e) = ((columns["warp"][row] * pixel, columns["warp"][row + 1] * pixel) for row in (0, 2))
    reach = fn.stack(math.abs(d) + math.abs(e), math.abs(a) + math.abs(b)) * (size / 2) + 1.0  # 1: bilinear's neighbour
    corner = math.clamp(math.floor(centre - reach), 0, sides - 1)
    end = math.clamp(math.ceil(centre + reach), 1, sides)
    middle = centre - corner
    rows = (a, b, middle[1] - (a + b) * (size / 2)), (d, e, middle[0] - (d + e) * (size / 2))
    return Part(corner, end - corner, rows)


def _distorted(images, rows, columns, transform):
    """Resamples images once by the rows of a matrix, varies brightness and contrast of each channel, and adds noise."""
    from nvidia.dali import fn, types

    size = transform.size
    images = warped(images, *rows, size, transform.device.name, as_float=True)
    images = fn.crop_mirror_normalize(images, mean=GREY - columns["brightness"], std=1 / columns["contrast"],
                                      shift=GREY, dtype=types.FLOAT, output_layout="HWC")
    field = np.random.Generator(np.random.Philox(0)).standard_normal((size + NOISE_MARGIN,) * 2 + (3,))
    field = types.Constant(field.astype(np.float32), layout="HWC", device=transform.device.name)
    noise = fn.slice(field, start=_as_int(columns["noise_offset"] * NOISE_MARGIN), shape=[size, size], axes=[0, 1])
    return fn.cast(images + noise * transform.on_device(columns["noise"]), dtype=types.UINT8)


def matrix_reader(rows: np.ndarray, scratch: Path, name: str = "numbers"):
    """Writes a float32 matrix as TFRecords and returns a function that adds their reader to the graph.

    The reader returns one row per sample. The records differ only in their numbers, so NumPy writes all of them as one
    structured array. The checksums stay 0, because DALI does not check them.

    rows: (samples, columns). scratch: the folder of the files. name: of the file and of the TFRecords' feature.
    """
    import tensorflow as tf

    width = rows.shape[1]
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=rows[0]))
    example = tf.train.Example(features=tf.train.Features(feature={name: feature})).SerializeToString()
    start = example.index(rows[0].tobytes())
    layout = np.dtype([("length", "<u8"), ("length_crc", "<u4"), ("head", f"S{start}"), ("row", "<f4", (width,)),
                       ("data_crc", "<u4")])
    file = np.zeros(len(rows), layout)
    file["length"] = len(example)
    file["head"] = example[:start]
    file["row"] = rows
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


def _as_int(numbers):
    from nvidia.dali import fn, types

    return fn.cast(numbers, dtype=types.INT32)
