"""Writes the files of a run that never was: of any size, in any state."""
from pathlib import Path

from common.files import as_json, write_json

FLAGS = {"data_dir": "/data/imagenet", "model": "resnet50", "image_size": "224", "epochs": "{epochs}",
         "batch_size": "256", "optimizer": "lars", "learning_rate": "2", "lr_schedule": "poly", "poly_power": "2.0",
         "warmup": "gradual", "warmup_epochs": "5.0", "warmup_learning_rate": "0.1", "momentum": "0.9",
         "weight_decay": "0.0001", "trust_coefficient": "0.001", "augmentation": "crop_flip", "precision": "float32"}


def plan(epochs: int) -> dict:
    return {"workers": 4, "train_samples": 1000, "epochs": epochs, "steps": 4 * epochs, "peak_learning_rate": 2.0,
            "exchange": {"allreduce": "torus", "grid": [2, 2], "by": "Horovod process sets", "why": "--torus_grid=2x2"},
            "phases": [{"start_epoch": 0, "end_epoch": epochs, "global_batch_size": 256, "micro_batch_size": 32,
                        "accumulation_steps": 2, "steps": 4 * epochs}],
            "batch_norm_span": [32], "image_size": [None], "learning_rate_breakpoints": [[0, 2.0], [epochs, 1.0]],
            "schedule": [{"epoch": epoch, "learning_rate": 2.0 - epoch / epochs, "momentum": 0.9,
                          "global_batch_size": 256} for epoch in range(epochs)]}


def row(epoch: int, **changed) -> dict:
    """A row of metrics.jsonl. top-1 is 0.5 after the first epoch and grows by 0.001 an epoch; an epoch takes 10 s."""
    return {"epoch": epoch, "samples": 1000 * epoch, "learning_rate": 1.0, "momentum": 0.9, "batch_size": 256,
            "train_loss": 2.0 / epoch, "train_top1": 0.4, "val_loss": 3.0 / epoch, "val_top1": 0.499 + 0.001 * epoch,
            "val_top5": 0.75, "weights": "2d11a7383c976410", "images_per_second": 125.0,
            "seconds": 10.0 * epoch} | changed


def summary(rows: list[dict], epochs: int) -> dict:
    last = rows[-1]
    return {name: last[name] for name in ("val_top1", "val_top5", "val_loss", "images_per_second", "seconds")} | {
        "val_samples": 50, "train_samples": 1000, "epochs": epochs, "global_batch_size": 256, "world_size": 4,
        "advice": []}


def flags_text(epochs: int, **flags) -> str:
    lines = {name: value.format(epochs=epochs) for name, value in FLAGS.items()} | flags
    return "".join(f"--{name}={value}\n" for name, value in lines.items())


def whole(folder: Path, epochs: int = 3, classes: int = 10, layers: int = 4, rows: list[dict] | None = None,
          done: bool = True, **flags) -> Path:
    """Writes all files but samples.jpg. Half of class 0 is predicted as class 1; the recipe reports 75.03 %."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(epoch + 1) for epoch in range(epochs)] if rows is None else rows
    write_json(folder / "plan.json", plan(epochs))
    (folder / "flags.txt").write_text(flags_text(epochs, **flags))
    (folder / "metrics.jsonl").write_text("".join(as_json(one) + "\n" for one in rows))
    (folder / "times.jsonl").write_text("".join(
        as_json({"epoch": one["epoch"], "compute": 0.7, "data": 0.2, "exchange": 0.1}) + "\n" for one in rows))
    if done:
        write_json(folder / "summary.json", summary(rows, epochs))
    write_json(folder / "run.json", {
        "command": "train.py --epochs=3", "started": "2026-11-22 13:05:02 +0000", "hosts": {"node1": 2, "node2": 2},
        "recipe": {"path": "/recipes/table3.flags", "row": "table 3, experiment 1", "reported": "top-1 75.03 %",
                   "flags": {"epochs": "90", "weight_decay": "1e-4", "model": "resnet50"}},
        "origins": {"epochs": "command line", "weight_decay": "recipe", "model": "recipe"},
        "dataset": {"folder": "/data/imagenet", "format": "tfrecord", "classes": classes, "train_samples": 1000,
                    "validation_samples": 50},
        "versions": {"bigbatch": "0.1.0", "TensorFlow": "2.15.1"}, "sample_classes": None,
        "git": {"revision": "1ebecd6", "changed": True}})
    confusion = [[0, 0, 5], [0, 1, 5], *([label, label, 5] for label in range(1, classes))]
    image = {"sample": 3, "name": "val.tfrecord, record 3", "label": 0, "predicted": 1, "loss": 4.25, "width": 500,
             "probability": 0.934,
             "image": "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAAAAAAALAAAAAABAAEAAAICTAEAOw=="}
    write_json(folder / "outcomes.json", {"epoch": epochs, "classes": [f"class {one}" for one in range(classes)],
                                          "confusion": confusion, "worst": [image]})
    ratios = {f"conv2d_{number}/kernel": [2.0, 0.5, 0.1 ** (1 + number % 5)] for number in range(layers)}
    (folder / "trust_ratios.jsonl").write_text("".join(
        as_json({"epoch": epoch, "samples": 1000 * epoch, "layers": ratios | {"dense/bias": [1.0, 1.0, 1.0]}}) + "\n"
        for epoch in range(epochs + 1)))
    (folder / "steps.jsonl").write_text("".join(as_json({
        "step": step, "epoch": step / 4, "seconds": 2.5 * step, "learning_rate": 1.0, "momentum": 0.9,
        "batch_size": 256, "loss": 2.0, "top1": 0.3}) + "\n" for step in range(4 * len(rows))))
    return folder
