"""TensorBoard's events: the same names in every run, rewritten from the run's files, beside profiles that stay."""
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.run_folder import LAYERS, RunFolder
from reporting import tensorboard
from reporting.run_log import Augmentations, RunLog, observers_of
from reporting.tensorboard import TensorBoard, markdown
from training.observer import Evaluation, Update
from training.state import Progress


def row(epoch, **more) -> dict:
    return {"epoch": epoch, "samples": 1000 * epoch, "learning_rate": 2.5, "momentum": 0.9, "batch_size": 128,
            "train_loss": 2 / epoch, "train_top1": 0.25, "val_loss": 3 / epoch, "val_top1": 0.1 * epoch,
            "val_top5": 0.5, "weights": "2d11a7383c976410", "images_per_second": 100.0, "seconds": 10.0 * epoch, **more}


def layers(epoch) -> dict:
    return {"conv2d/kernel": [1.0 * epoch, 2.0, 0.5], "dense/bias": [0.0, 1.0, 1.0]}


def logged(folder: Path, epochs, progress=(0, 0), **more):
    """The observers after so many evaluations. progress: steps and evaluations before."""
    flags = {"model": "resnet20", "exclude": [], "learning_rate": "0:29|x", "save_augmentations": True}
    run = SimpleNamespace(
        folder=folder, flags=flags, flags_text="", images=lambda *_: (np.zeros((4, 8, 8, 3), np.uint8), []),
        progress=Progress(
            step=progress[0], evaluations=progress[1], evaluated=1000 * progress[1]),
        plan={"workers": 2, "steps": 39, "phases": [{"steps": 30, "image_size": 16}, {"steps": 9}],
              "schedule": [{"epoch": 0}]})
    files = RunFolder(folder)
    observers = [RunLog(files), Augmentations(files), TensorBoard(files)]
    for observer in observers:
        observer.start(run)
    for observer in observers if not progress[0] else ():
        observer.step(Update(0, 0.0, 128, 2.5, 0.9, 2.0, 0.1, layers=layers(1)))
    for epoch in epochs:
        for observer in observers:
            observer.evaluation(Evaluation(row(epoch, **more), layers(epoch), {"compute": 0.75, "data": 0.25}, None))
    return observers


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> steps and values of the scalars; other names -> nothing."""
    read = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0})
    read.Reload()
    found = {}
    for name in read.Tags()["tensors"]:
        scalar = read.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
        found[name] = [(event.step, _value(event)) for event in read.Tensors(name)] if scalar else []
    return found


def _value(event) -> float:
    import tensorflow as tf

    return float(tf.make_ndarray(event.tensor_proto))


SCALARS = {"loss/train", "loss/validation", "top1/train", "top1/validation", "top5/validation",
           "schedule/learning_rate", "schedule/momentum", "schedule/batch_size", "throughput/images_per_second",
           "throughput/seconds", "throughput/epochs", "time/compute", "time/data",
           *(f"{kind}/{layer}" for kind in ("weight_norm", "gradient_norm", "trust_ratio")
             for layer in ("conv2d/kernel", "dense/bias"))}


def test_an_optimizer_without_trust_ratios_has_no_events_of_them():
    assert tensorboard.SCALARS[LAYERS]({"layers": {"a/kernel": [2.0, 0.5]}}) == {
        "weight_norm/a/kernel": 2.0, "gradient_norm/a/kernel": 0.5}


def test_names_values_and_texts(tmp_path):
    more = {"ema_val_top1": 0.75, "ema_views_val_loss": 0.5, "views_val_top5": 1.0, "new": 5.0}
    logged(tmp_path, [1, 2], **more)[-1].close()
    found = events(tmp_path)
    assert {*found} == SCALARS | {
        "top1/ema", "loss/ema_views", "top5/views", "other/new", "flags", "plan", "augmentations"}
    assert found["top1/validation"] == [(1000, pytest.approx(0.1)), (2000, pytest.approx(0.2))]
    assert found["weight_norm/conv2d/kernel"] == [(0, 1.0), (1000, 1.0), (2000, 2.0)]
    assert found["time/data"] == [(1000, 0.25), (2000, 0.25)]


def test_a_resumed_run_and_a_rollback_rewrite_the_events_and_keep_profiles(tmp_path):
    observers = logged(tmp_path, [1, 2, 3])
    before = events(tmp_path)
    profile = tmp_path / "tensorboard" / "plugins" / "profile" / "now" / "host.xplane.pb"
    profile.parent.mkdir(parents=True)
    profile.touch()
    for observer in observers:
        observer.rewind(Progress(step=20, evaluations=2, evaluated=2000))
    assert [step for step, _ in events(tmp_path)["loss/train"]] == [1000, 2000]
    resumed = logged(tmp_path, [3], progress=(20, 2))
    resumed[-1].close()
    assert events(tmp_path) == before and profile.exists()
    assert len([json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]) == 3


def test_who_reads_the_folder_is_called_after_who_writes_to_it(tmp_path):
    made = observers_of(SimpleNamespace(save_augmentations=True), RunFolder(tmp_path))
    assert [type(one).__name__ for one in made][3:] == ["TensorBoard", "ReportWriter"]


def test_tables_in_markdown():
    assert markdown([{"a": 1, "b": "x|y"}, {"a": 2, "c": 3}]) == (
        "| a | b | c |\n| --- | --- | --- |\n| 1 | x\\|y |  |\n| 2 |  | 3 |")
