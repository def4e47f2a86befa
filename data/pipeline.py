"""The DALI pipeline: reader -> decode -> augment -> normalised batch; one graph for CPU and GPU.

Importing it does not import DALI: the names of the augmentations can be listed, and a flag checked, at once.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Augmentation:
    """How training images are drawn, and how validation images are brought to the same size.

    area, aspect: the ranges of a random-resized crop (arXiv:1409.4842, section 6), or None for none.
    flip: mirror every second image.
    enlarge: validation, and training without a random crop, resize the shorter side to image_size * enlarge before
        the centre crop.
    """

    description: str
    area: tuple[float, float] | None = None
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False
    enlarge: float = 1.0


AUGMENTATIONS = {
    "none": Augmentation("resize, centre crop"),
    "crop": Augmentation("a gentle random-resized crop, for signs that must not be mirrored",
                         area=(0.7, 1.0), aspect=(0.85, 1.18)),
    "crop_flip": Augmentation("ResNet's: random-resized crop and flip; validation resizes to 256/224, centre crop",
                              area=(0.08, 1.0), flip=True, enlarge=256 / 224),
}


def build_pipeline(paths, indexes, *, batch_size, image_size, augmentation, training, mean, std, device, device_id,
                   threads, seed):
    """The pipeline over the samples that the index files name, in their order, again and again.

    Outputs: images float32 (batch, image_size, image_size, 3), normalised; labels int64 (batch, 1).
    device: "cpu" or "gpu": where images are decoded and augmented.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali import tfrecord as features

    recipe = AUGMENTATIONS[augmentation]
    decoder = "mixed" if device == "gpu" else "cpu"

    @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=device_id, seed=seed)
    def graph():
        record = fn.readers.tfrecord(
            path=paths, index_path=indexes, random_shuffle=False, name="reader",
            features={"image/encoded": features.FixedLenFeature((), features.string, ""),
                      "image/class/label": features.FixedLenFeature([1], features.int64, -1)})
        encoded, label = record["image/encoded"], record["image/class/label"]
        mirror = fn.random.coin_flip() if training and recipe.flip else 0
        if training and recipe.area:
            images = fn.decoders.image_random_crop(encoded, device=decoder, output_type=types.RGB,
                                                   random_area=recipe.area, random_aspect_ratio=recipe.aspect)
            images = fn.resize(images, size=(image_size, image_size))
        else:
            images = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
            images = fn.resize(images, resize_shorter=round(image_size * recipe.enlarge))
        images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="HWC", mirror=mirror, mean=mean,
                                          std=std, crop=(image_size, image_size))
        return images, label.gpu() if device == "gpu" else label

    return graph()
