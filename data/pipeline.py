"""The DALI pipeline: reader -> decode -> augment -> normalised batch; one graph for CPU and GPU.

Importing it does not import DALI: the names of the augmentations can be listed, and a flag checked, at once.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Augmentation:
    """How training images are drawn, and how validation images are brought to the same size.

    area, aspect: the ranges of a random-resized crop (arXiv:1409.4842, section 6); without an area, the shorter side
        is resized to image_size * enlarge and a square cut out, at a random place with `shift`, else in the centre.
    flip: mirror every second image.
    warp: turn, slant and shrink by a little, over a grey border; then vary brightness and contrast, and add noise.
    enlarge: validation resizes the shorter side to image_size * enlarge before the centre crop.
    """

    description: str
    area: tuple[float, float] | None = None
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    shift: bool = False
    flip: bool = False
    warp: bool = False
    enlarge: float = 1.0


AUGMENTATIONS = {
    "none": Augmentation("resize, centre crop"),
    "crop": Augmentation("a gentle random-resized crop, for signs that must not be mirrored",
                         area=(0.7, 1.0), aspect=(0.85, 1.18)),
    "crop_flip": Augmentation("ResNet's: random-resized crop and flip; validation resizes to 256/224, centre crop",
                              area=(0.08, 1.0), flip=True, enlarge=256 / 224),
    "alexnet": Augmentation("AlexNet's: resize to 256/227, random crop, flip", shift=True, flip=True,
                            enlarge=256 / 227),
    "full": Augmentation("arXiv:1811.05233's list (3.2): padding, scaling, rotation, resizing, distortion, flip, "
                         "brightness, contrast, noise", area=(0.08, 1.0), flip=True, warp=True, enlarge=256 / 224),
}
GREY = 127.5


def build_pipeline(paths, indexes, *, batch_size, image_size, augmentation, training, mean, std, device, device_id,
                   threads, seed):
    """The pipeline over the samples that the index files name, in their order, again and again.

    Outputs: images float32 (batch, image_size, image_size, 3), normalised; labels int64 (batch, 1).
    device: "cpu" or "gpu": where images are decoded and augmented.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali import tfrecord as features

    recipe = AUGMENTATIONS[augmentation]
    decoder = {"device": "mixed" if device == "gpu" else "cpu", "output_type": types.RGB}

    @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=device_id, seed=seed)
    def graph():
        record = fn.readers.tfrecord(
            path=paths, index_path=indexes, random_shuffle=False, name="reader",
            features={"image/encoded": features.FixedLenFeature((), features.string, ""),
                      "image/class/label": features.FixedLenFeature([1], features.int64, -1)})
        encoded, label = record["image/encoded"], record["image/class/label"]
        if training and recipe.area:
            images = fn.decoders.image_random_crop(encoded, random_area=recipe.area,
                                                   random_aspect_ratio=recipe.aspect, **decoder)
            images = fn.resize(images, size=(image_size, image_size))
        else:
            images = fn.decoders.image(encoded, **decoder)
            images = fn.resize(images, resize_shorter=round(image_size * recipe.enlarge))
        if training and recipe.warp:
            images = _warp(images, image_size)
        place = {axis: fn.random.uniform(range=(0.0, 1.0)) for axis in ("crop_pos_x", "crop_pos_y")
                 if training and recipe.shift}
        mirror = fn.random.coin_flip() if training and recipe.flip else 0
        images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="HWC", mirror=mirror, mean=mean,
                                          std=std, crop=(image_size, image_size), **place)
        return images, label.gpu() if device == "gpu" else label

    return graph()


def _warp(images, size):
    from nvidia.dali import fn, types

    def uniform(low, high, **shape):
        return fn.random.uniform(range=(low, high), **shape)

    centre = (size / 2, size / 2)
    matrix = fn.transforms.rotation(angle=uniform(-10.0, 10.0), center=centre)
    matrix = fn.transforms.shear(matrix, shear=uniform(-0.1, 0.1, shape=2), center=centre)
    matrix = fn.transforms.scale(matrix, scale=uniform(0.9, 1.1, shape=2), center=centre)
    images = fn.warp_affine(images, matrix=matrix, fill_value=GREY, inverse_map=False)
    images = fn.brightness_contrast(images, brightness=uniform(0.8, 1.2), contrast=uniform(0.8, 1.2),
                                    contrast_center=GREY, dtype=types.FLOAT)
    return fn.noise.gaussian(images, stddev=uniform(0.0, 8.0))
