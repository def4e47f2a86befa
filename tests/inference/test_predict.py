"""--mode=export and --mode=predict from the command line: against --mode=evaluate, and what can go wrong."""
import csv
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from conftest import DIGITS, ROOT, printed_json, run, train
from PIL import Image

from common.errors import UserError
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from inference import predict
from inference.preprocessing import ORIENTATION, preprocess
from tests.rigs.pictures import encode, picture

pytestmark = pytest.mark.trainings

SHORT = ("--epochs=2", "--model=convnet", "--optimizer=sgd", "--learning_rate=0.05", "--warmup=none")


ROUNDED = 5e-5  # to four digits


@pytest.fixture(scope="module")
def digits_run(train_once) -> Path:
    return train_once("--epochs=2")


@pytest.fixture(scope="module")
def averaged_run(train_once) -> Path:
    return train_once(*SHORT, "--ema_decay=0.9", "--augmentation=caffe", "--precision=mixed_bfloat16")


@pytest.fixture(scope="module")
def validation(digits, tmp_path_factory) -> tuple[Path, list[int]]:
    """A folder of the validation images, and their labels in the order of their names."""
    folder, split = tmp_path_factory.mktemp("images"), open_dataset(digits).validation
    records = list(split.kind.records(split.paths[0], split.entries[0], np.arange(split.samples)))
    for number, (encoded, _) in enumerate(records):
        (folder / f"{number:03}.jpg").write_bytes(encoded)
    return folder, [label for _, label in records]


def lines(done) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("fixture", ["digits_run", "averaged_run"])
def test_evaluation_prediction_saved_model_and_onnx_agree(fixture, validation, tmp_path, request):
    """On the digits: the same counts. With a moving average, its counts; the crop is that of the recipe."""
    checkpoint, (folder, labels) = f"--checkpoint={request.getfixturevalue(fixture)}/checkpoints", validation
    averaged = fixture == "averaged_run"
    evaluated = printed_json(train("--mode=evaluate", checkpoint, "--precision=float32"))
    prefix = "ema_val_" if averaged else "val_"
    expected = [evaluated[f"{prefix}{top}_count"] for top in ("top1", "top5")]

    done = train("--mode=predict", checkpoint, f"--image={folder}")
    predicted = lines(done)
    assert [row["file"] for row in predicted] == [str(path) for path in sorted(folder.iterdir())]
    named = [[int(one["class"]) for one in row["top"]] for row in predicted]
    assert expected == [sum(label in row[:top] for row, label in zip(named, labels, strict=True)) for top in (1, 5)]
    probabilities = np.array([[one["probability"] for one in row["top"]] for row in predicted])
    assert (np.diff(probabilities, axis=1) <= 0).all() and (probabilities.sum(axis=1) <= 1 + 5 * ROUNDED).all()

    exported = printed_json(train("--mode=export", checkpoint, f"--output_dir={tmp_path}", "--tflite"))
    assert exported == {"saved_model": f"{tmp_path}/saved_model", "keras": f"{tmp_path}/model.h5",
                        "onnx": f"{tmp_path}/model.onnx", "tflite": f"{tmp_path}/model.tflite", "classes": 10,
                        "image_size": 32, "epoch": 2, "weights": "moving average" if averaged else "last"}
    assert (tmp_path / "classes.txt").read_text().split() == [*map(str, range(10))]
    encoded = [path.read_bytes() for path in sorted(folder.iterdir())]
    classify = tf.saved_model.load(exported["saved_model"]).signatures["serving_default"]
    served = classify(image_bytes=tf.constant(encoded))
    assert [[int(name) for name in row] for row in served["classes"].numpy()] == named
    np.testing.assert_allclose(served["probabilities"], probabilities, atol=1e-5 + ROUNDED)

    session = onnxruntime.InferenceSession(exported["onnx"])
    assert session.get_modelmeta().custom_metadata_map["image_size"] == "32"
    every = np.concatenate([session.run(["probabilities"], {"images": tf.io.decode_jpeg(
        one, channels=3, dct_method="INTEGER_ACCURATE").numpy()[None]})[0] for one in encoded])
    np.testing.assert_allclose(-np.sort(-every)[:, :5], served["probabilities"], atol=1e-5)
    hits = np.sum(np.argsort(-every, kind="stable")[:, :5] == np.array(labels)[:, None], axis=0)
    assert [hits[0], hits.sum()] == expected

    enlarge = AUGMENTATIONS["caffe" if averaged else "none"].enlarge
    pixels = np.stack([preprocess(one, 32, enlarge) for one in encoded])
    model = tf.keras.models.load_model(exported["keras"], compile=False)
    np.testing.assert_allclose(model.predict(pixels, verbose=0), every, atol=1e-5)
    interpreter = tf.lite.Interpreter(exported["tflite"])
    [given], [result] = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], pixels.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], pixels)
    interpreter.invoke()
    np.testing.assert_allclose(interpreter.get_tensor(result["index"]), every, atol=1e-4)


def test_files_folders_and_formats(digits_run, tmp_path):
    """Several --image, names from a shell, folders; formats that DALI does not read; what is not an image is named."""
    names = {"a b/deep/é.PNG": "PNG", "a b/plain.jpeg": "JPEG", "a b/web.webp": "WEBP", "one.tiff": "TIFF",
             "two.gif": "GIF", "no suffix": "BMP"}
    for number, (name, kind) in enumerate(names.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode(picture(number), kind))
    (tmp_path / "a b" / "deep" / "bare").write_bytes(encode(picture(9)))
    (tmp_path / "a b" / "notes.txt").write_text("no image")
    (tmp_path / "a b" / ".hidden.jpg").write_text("no image")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "pointer.jpg").write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    (tmp_path / "cut.jpg").write_bytes(encode(picture(1))[:-60])
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg"))
    strange.write_bytes(encode(picture(2)))
    done = run("python", 1, ROOT / "train.py", "--mode=predict", f"--checkpoint={digits_run}/checkpoints",
               f"--image={tmp_path}/a b", "--image", *(tmp_path / name for name in (
                   "one.tiff", "text.jpg", "pointer.jpg", "two.gif", "missing.jpg", "cut.jpg", "no suffix",
                   "one.tiff")), strange, "--device=cpu",
               f"--output_dir={tmp_path}/results")
    assert done.returncode == 1
    with (tmp_path / "results" / "predictions.csv").open(newline="") as file:
        table = [*csv.DictReader(file)]
    assert [(row["file"], row["class_5"], float(row["probability_5"])) for row in table] == [
        (row["file"].replace("\udcff", "\\xff"), row["top"][4]["class"], row["top"][4]["probability"])
        for row in lines(done)]
    assert (tmp_path / "results" / "report.html").read_text().count("<figure ") == len(table) == 9
    expected = ["a b/deep/bare", "a b/deep/é.PNG", "a b/plain.jpeg", "a b/web.webp", "one.tiff", "two.gif",
                "no suffix", "one.tiff"]
    assert [row["file"] for row in lines(done)] == [*(f"{tmp_path}/{name}" for name in expected), str(strange)]
    assert done.stderr.splitlines() == [
        f"train.py: left out of {tmp_path}/a b: files that are no images (1): notes.txt; hidden files, system files "
        "(such as Thumbs.db) and links that lead nowhere (1): .hidden.jpg",
        f"train.py: {tmp_path}/text.jpg: not an image of a known format",
        f"train.py: {tmp_path}/pointer.jpg: it is a Git LFS pointer; `git lfs pull` in its repository fetches the file",
        f"train.py: {tmp_path}/missing.jpg: No such file or directory",
        done.stderr.splitlines()[4], "train.py: 4 of 13 images could not be read; the lines above name them"]
    assert done.stderr.splitlines()[4].startswith(f"train.py: {tmp_path}/cut.jpg: ")


def test_orientation_is_applied(digits_run, tmp_path):
    from PIL import Image

    upright, exif = picture(7, (41, 30)), Image.Exif()
    exif[ORIENTATION] = 6  # to be shown turned clockwise
    (tmp_path / "upright.png").write_bytes(encode(upright, "PNG"))
    (tmp_path / "turned.png").write_bytes(encode(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif))
    one, other = lines(train("--mode=predict", f"--checkpoint={digits_run}/checkpoints", f"--image={tmp_path}"))
    assert one["top"] == other["top"]


def test_the_dataset_may_be_gone(in_format, tmp_path, validation):
    """Class names, mean and standard deviation come from dataset.json; a copy of this file is enough."""
    folder, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(in_format("tfrecord"), data)
    train(DIGITS, *SHORT, "--epochs=0.1", f"--data_dir={data}", f"--output_dir={folder}")
    predict = ("--mode=predict", f"--checkpoint={folder}", f"--image={validation[0]}/000.jpg")
    before = train(*predict).stdout
    moved = tmp_path / "copy"
    moved.mkdir()
    (data / "dataset.json").rename(moved / "dataset.json")
    shutil.rmtree(data)
    done = run("python", 1, ROOT / "train.py", *predict)
    assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert str(data) in done.stderr and "copy of its dataset.json" in done.stderr
    assert train(*predict, f"--data_dir={moved}").stdout == before


@pytest.mark.parametrize(("flags", "code", "message"), [
    (["--mode=export"], 2, "--mode=export needs --checkpoint"),
    (["--mode=export", "--checkpoint={run}/checkpoints"], 2, "--mode=export needs --output_dir"),
    (["--mode=predict", "--image=x.jpg"], 2, "--mode=predict needs --checkpoint"),
    (["--mode=predict", "--checkpoint={run}/checkpoints"], 2, "--mode=predict needs --image"),
    (["--image=x.jpg"], 2, "--image has no effect with --mode=train"),
    (["--mode=export", "--checkpoint={run}", "--output_dir={empty}/x", "--init_checkpoint={run}"], 2,
     "--init_checkpoint has no effect"),
    (["--mode=predict", "--checkpoint={run}", "--image={file}", "--output_dir={run}"], 1, "is the folder of a run"),
    (["--mode=export", "--checkpoint={run}", "--output_dir={empty}/x", "x.jpg"], 2, "'x.jpg' is not a flag"),
    (["--mode=predict", "--checkpoint={run}", "--image={empty}"], 1, "contains no images"),
    (["--mode=predict", "--checkpoint={empty}", "--image=x.jpg"], 1, "is not in a run folder"),
    (["--mode=export", "--checkpoint={run}", "--output_dir={file}"], 1, "cannot be written"),
    (["--mode=export", "--checkpoint={run}", "--output_dir={empty}/x", "--model=resnet18"], 1, "does not fit"),
    (["--mode=predict", "--checkpoint={run}", "--image={file}", "--data_dir={none}"], 1, "there is no dataset in"),
])
def test_bad_input(flags, code, message, digits_run, tmp_path):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "empty").mkdir()
    places = {"run": digits_run, "empty": tmp_path / "empty", "file": tmp_path / "file", "none": tmp_path / "none"}
    done = run("python", 1, ROOT / "train.py", *(flag.format(**places) for flag in flags))
    assert done.returncode == code and message in done.stderr and not done.stdout, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not any((tmp_path / "empty").iterdir())


def test_one_worker(digits_run, tmp_path):
    done = run("mpirun", 2, ROOT / "train.py", "--mode=export", f"--checkpoint={digits_run}",
               f"--output_dir={tmp_path}/x")
    assert done.returncode == 1 and "start it without a launcher" in done.stderr and not (tmp_path / "x").exists()


def test_files_are_read_by_several_threads_and_keep_their_order(tmp_path, monkeypatch, capsys):
    """Each read waits for another one; the network is a stand-in, whose first class is as probable as red is bright."""
    met, store = threading.Barrier(2), predict.store
    monkeypatch.setattr(predict, "cores_of_worker", lambda _: 2)
    monkeypatch.setattr(predict, "store", lambda *given: (met.wait(300), store(*given))[1])
    files = [tmp_path / f"{number}.png" for number in range(40)]
    for number, file in enumerate(files):
        Image.new("RGB", (8, 8), (5 * number, 0, 0)).save(file)
    files[7].write_bytes(b"no image")
    trained = SimpleNamespace(image_size=8, enlarge=1.0, classes=("red", "other"), probabilities=lambda images: (
        tf.stack([images[:, 0, 0, 0] / 255, 1 - images[:, 0, 0, 0] / 255], axis=1)))
    rows = predict.predict(trained, files)
    found = [next(rows) for _ in range(39)]
    with pytest.raises(UserError, match="1 of 40 images"):
        next(rows)
    assert [row["file"] for row in found] == [str(file) for number, file in enumerate(files) if number != 7]
    red = [{guess["class"]: guess["probability"] for guess in row["top"]}["red"] for row in found]
    assert red == pytest.approx([5 * number / 255 for number in range(40) if number != 7], abs=1e-4)
    assert f"{files[7]}: " in capsys.readouterr().err
