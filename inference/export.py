"""Exports a trained model (--mode=export)."""
import sys
from pathlib import Path

import tensorflow as tf

from common.errors import UserError, complain, reason
from inference import onnx_model
from inference.saved_model import write_saved_model
from inference.trained import Trained


def export(trained: Trained, folder: Path) -> dict:
    """Writes FOLDER/saved_model and FOLDER/model.onnx. Returns what to print.

    Without the packages of the extra `onnx`, it writes the SavedModel alone and says so. Raises UserError.
    """
    saved_model = folder / "saved_model"
    onnx = folder / "model.onnx"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_saved_model(trained, saved_model)
        print(f"saved model: {saved_model}", file=sys.stderr)
        onnx.unlink(missing_ok=True)  # of an earlier export, with other weights
        if onnx_model.is_available():
            onnx_model.write_onnx(trained, onnx)
            print(f"onnx: {onnx}", file=sys.stderr)
        else:
            complain(onnx_model.MISSING)
    except tf.errors.OpError as error:
        raise UserError(f"--output_dir: {folder} cannot be written: {reason(error)}") from None
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written: {error.strerror or error}") from None
    return {"saved_model": str(saved_model), "onnx": str(onnx) if onnx.exists() else None,
            "classes": len(trained.classes), "image_size": trained.image_size, "epoch": trained.epoch,
            "weights": trained.weights}
