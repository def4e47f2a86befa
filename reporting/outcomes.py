"""outcomes.json: the confusion matrix of the best evaluation, and pictures of the worst errors."""
import base64
import io

import numpy as np
from PIL import Image, ImageOps

from reporting.pictures import encoded
from training.outcomes import Outcomes

WORST = 12
THUMBNAIL = 128  # pixels, the longer side


def outcomes_json(outcomes: Outcomes, dataset, epoch: float) -> dict:
    """Returns the content of outcomes.json.

        confusion   [label, predicted class, number of samples] for each pair that occurs
        worst       the wrongly classified samples with the highest losses whose images decode, worst first, each with
                    `sample`, `name`, `label`, `predicted`, `loss`, `probability` (of the predicted class),
                    `image` (a data URI), `width` (of the original)

    outcomes: of the validation samples. dataset: data.dataset.Dataset.
    """
    labels, predicted = outcomes.pairs
    pairs, counts = np.unique(labels * len(dataset.classes) + predicted, return_counts=True)
    confusion = [[*divmod(pair, len(dataset.classes)), count] for pair, count in zip(pairs.tolist(), counts.tolist(),
                                                                                     strict=True)]
    samples = worst(outcomes)
    pictures = thumbnails(dataset.validation, np.sort(samples))
    shown = [{"sample": sample, "name": dataset.validation.name(sample), "label": int(labels[sample]),
              "predicted": int(predicted[sample]), "loss": float(outcomes.losses[sample]),
              "probability": float(outcomes.probabilities[sample])} | pictures[sample]
             for sample in samples.tolist() if sample in pictures]
    return {"epoch": epoch, "classes": list(dataset.classes), "confusion": confusion, "worst": shown}


def worst(outcomes: Outcomes, most: int = WORST) -> np.ndarray:
    """Returns the numbers of the wrongly classified samples with the highest losses, worst first, int64."""
    wrong = np.flatnonzero(outcomes.labels != outcomes.predicted)
    losses = np.nan_to_num(outcomes.losses[wrong], nan=np.inf, posinf=np.inf)
    return wrong[np.argsort(-losses, kind="stable")[:most]]


def thumbnails(split, samples: np.ndarray) -> dict[int, dict]:
    """Returns sample -> image (a data URI) and width (of the original) of those that decode.

    split: data.dataset.Split. samples: ascending.
    """
    pictures = (thumbnail(record) for record, _ in split.records(samples))
    return {sample: picture for sample, picture in zip(samples.tolist(), pictures, strict=True) if picture}


def thumbnail(record: bytes) -> dict | None:
    """Returns a small version of an encoded image, as its EXIF data turn it, or None if Pillow cannot decode it."""
    try:
        image = Image.open(io.BytesIO(record))
        width = image.width
        image.draft("RGB", (THUMBNAIL, THUMBNAIL))  # a JPEG is decoded at a smaller scale
        image = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    content = base64.b64encode(encoded(image, "JPEG", quality=85)).decode()
    return {"image": f"data:image/jpeg;base64,{content}", "width": width}
