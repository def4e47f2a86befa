"""--mode=evaluate on the images of a folder of one's own, and predictions.csv."""
import csv
import json
import re
import shlex
import shutil
import unicodedata

import pytest
from conftest import ROOT, TRAIN, printed_json, rows, run, train

from data.dataset import open_dataset
from tests.rigs.pictures import CLASSES, command, encode, fill, picture

FLAGS = ("--model=convnet", "--image_size=24", "--batch_size=8", "--batch_norm_span=auto", "--micro_batch_size=4",
         "--epochs=1", "--deterministic")
METRICS = ("val_loss", "val_top1", "val_top5", "val_samples")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("photos") / "photos", 12)


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train(f"--data_dir={photos}", *FLAGS, f"--output_dir={folder}")
    return folder


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """New pictures of two of the three classes, the last one first, and an empty folder."""
    folder = fill(tmp_path_factory.mktemp("test") / "mine", 5, first=500, classes=CLASSES[:0:-1])
    (folder / "empty").mkdir()
    return folder


def evaluated(trained, *flags, **options):
    return train("--mode=evaluate", f"--checkpoint={trained}/checkpoints/best", *flags, **options)


def table(folder) -> list[dict]:
    with open(folder / "predictions.csv", newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.trainings
def test_a_folder_of_test_images_is_evaluated_whole(trained, tested, tmp_path):
    """As prediction sees each image. Files are named, labels are the model's, and workers make no difference."""
    done = evaluated(trained, f"--data_dir={tested}", f"--output_dir={tmp_path}/one")
    assert f"all 10 images in {tested} are evaluated, because the run was trained on another folder" in done.stderr
    found, made = table(tmp_path / "one"), printed_json(done)
    predicted = train("--mode=predict", f"--checkpoint={trained}/checkpoints/best", f"--image={tested}")
    expected = [json.loads(line) for line in predicted.stdout.splitlines()]
    assert [row["file"] for row in found] == [row["file"] for row in expected]
    assert [row["file"] for row in found] == sorted(map(str, tested.rglob("*.jpg")))
    for row, own in zip(found, expected, strict=True):
        assert row["label"] == row["file"].split("/")[-2] and row["predicted"] == row["class_1"]
        assert [row[f"class_{rank}"] for rank in (1, 2, 3)] == [guess["class"] for guess in own["top"]]
        assert [float(row[f"probability_{rank}"]) for rank in (1, 2, 3)] == pytest.approx(
            [guess["probability"] for guess in own["top"]], abs=1e-3)
    right = sum(row["label"] == row["predicted"] for row in found)
    assert made["val_samples"] == 10 and made["val_top1_count"] == right and made == json.loads(
        (tmp_path / "one" / "summary.json").read_text())
    page = (tmp_path / "one" / "report.html").read_text()
    assert f"{10 - right} of 10 images are classified wrongly" in page and "Classes, weakest first" in page
    assert page.count('src="data:image/jpeg') == 10 - right and f"{tested}</td>" in page
    evaluated(trained, f"--data_dir={tested}", f"--output_dir={tmp_path}/two", kind="mpirun", workers=2)
    assert table(tmp_path / "two") == found


@pytest.mark.parametrize("name", ["test", "val", "Testing"])
def test_a_folder_with_only_a_test_set(trained, tested, tmp_path, name):
    """Or the test set itself, with training images in the next folder. macOS writes a name in another form."""
    shutil.copytree(tested, tmp_path / "mine" / name)
    (tmp_path / "mine" / name / CLASSES[2]).rename(tmp_path / "mine" / name / unicodedata.normalize("NFD", CLASSES[2]))
    for given in (tmp_path / "mine", tmp_path / "mine" / name):
        made = printed_json(done := evaluated(trained, f"--data_dir={given}"))
        assert f"all 10 images in {tmp_path}/mine/{name} are evaluated" in done.stderr and made["val_samples"] == 10
        assert "\ntest: top-1 " in done.stderr and "\nvalidation: " not in done.stderr
        shutil.copytree(tested, tmp_path / "mine" / "train", dirs_exist_ok=True)


@pytest.mark.trainings
def test_the_folder_of_the_training_keeps_its_validation_images(photos, trained, tmp_path):
    """By any path, also a copy. Evaluated whole, it would look better than it is."""
    (tmp_path / "link").symlink_to(photos)
    shutil.copytree(photos, tmp_path / "copy")
    for flags in ([], [f"--data_dir={tmp_path}/link"], [f"--data_dir={tmp_path}/copy"]):
        done = evaluated(trained, *flags)
        assert {name: printed_json(done)[name] for name in METRICS} == {
            name: rows(trained)[-1].get(name, open_dataset(photos).validation.samples) for name in METRICS}
        assert "are evaluated: those that were set aside when the run was trained on the other" in done.stderr
    shutil.copy(photos / "dog" / "1 ü.jpg", tmp_path / "copy" / "dog" / "new.jpg")
    assert "all 37 images in" in evaluated(trained, f"--data_dir={tmp_path}/copy").stderr
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(photos, tmp_path / "grown")
    flags = (tmp_path / "run" / "flags.txt").read_text()
    (tmp_path / "run" / "flags.txt").write_text(flags.replace(f"--data_dir={photos}", f"--data_dir={tmp_path}/grown"))
    shutil.copy(photos / "dog" / "1 ü.jpg", tmp_path / "grown" / "dog" / "new.jpg")
    said = train("--mode=evaluate", f"--checkpoint={tmp_path}/run/checkpoints/best").stderr
    assert "that their names set aside from training; the images in the folder have changed since the run" in said
    again = run("python", 1, TRAIN, f"--data_dir={tmp_path}/grown", f"--output_dir={tmp_path}/run")
    assert again.returncode == 1 and "train_samples was 27 and is now 28" in again.stderr
    longer = shlex.split(re.search("is: uv run train.py (.*); run that", again.stderr)[1])
    assert "took " in train(*longer).stderr and (tmp_path / "run-longer" / "summary.json").exists()
    refused = run("python", 1, TRAIN, "--mode=evaluate", f"--checkpoint={trained}", "--validation_fraction=0.5")
    assert refused.returncode == 2 and "--validation_fraction has no effect with --mode=evaluate" in refused.stderr


def test_a_prepared_set_names_the_files_that_it_was_made_from(trained, tested, tmp_path):
    shutil.copytree(tested, tmp_path / "mine")
    (tmp_path / "mine" / "empty").rmdir()
    assert command(f"--source={tmp_path}/mine", f"--output={tmp_path}/set", "--validation_fraction=0.4") == 0
    done = evaluated(trained, f"--data_dir={tmp_path}/set", f"--output_dir={tmp_path}/out")
    split = open_dataset(tmp_path / "set").validation
    assert f"the {split.samples} validation images of {tmp_path}/set are evaluated" in done.stderr
    assert "\nvalidation: top-1 " in done.stderr and "validation: top-1 " in (tmp_path / "out/report.html").read_text()
    found = table(tmp_path / "out")
    assert [row["file"] for row in found] == [split.source_name(sample) for sample in range(split.samples)]
    assert all(row["label"] == row["file"].partition("/")[0] for row in found)


def test_a_class_that_the_model_does_not_know_is_an_error(trained, tested, tmp_path):
    shutil.copytree(tested, tmp_path / "mine")
    fill(tmp_path / "mine", 1, first=900, classes=("wolf",))
    done = run("mpirun", 2, ROOT / "train.py", "--mode=evaluate", f"--checkpoint={trained}/checkpoints/best",
               f"--data_dir={tmp_path}/mine", f"--output_dir={tmp_path}/out")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    [line] = {line for line in done.stderr.splitlines() if line.startswith("train.py: --data_dir")}
    assert line.endswith("the model does not know the class 'wolf'; it knows 'a b', 'dog', 'épée', and the dataset has "
                         "'dog', 'wolf', 'épée'")


def test_a_folder_without_images_is_an_error(trained, tmp_path):
    (tmp_path / "mine" / "dog").mkdir(parents=True)
    done = run("python", 1, TRAIN, "--mode=evaluate", f"--checkpoint={trained}/checkpoints/best",
               f"--data_dir={tmp_path}/mine")
    assert done.returncode == 1 and "contains neither dataset.json" in done.stderr and "Traceback" not in done.stderr


def test_a_picture_that_dali_does_not_read_is_evaluated_from_a_prepared_set(trained, tested, tmp_path):
    """A phone may name HEIC .jpg. The command that the error names prepares all pictures for evaluation."""
    shutil.copytree(tested, tmp_path / "mine")
    (tmp_path / "mine" / "empty").rmdir()
    (tmp_path / "mine" / "dog" / "phone.jpg").write_bytes(encode(picture(7), "HEIF"))
    flags = ("--mode=evaluate", f"--checkpoint={trained}/checkpoints/best")
    done = run("python", 1, TRAIN, *flags, f"--data_dir={tmp_path}/mine")
    told = f"{tmp_path}/mine/dog/phone.jpg: DALI does not read GIF, HEIC and AVIF, whatever their names; run `"
    assert done.returncode == 1 and told in done.stderr
    [prepare] = re.findall(r"`uv run python -m data.prepare (.*?)`, then this command with ", done.stderr)
    assert command(*shlex.split(prepare)) == 0 and command("--verify", f"--output={tmp_path}/mine-prepared") == 0
    made = printed_json(evaluated(trained, f"--data_dir={tmp_path}/mine-prepared", f"--output_dir={tmp_path}/out"))
    assert made["val_samples"] == 11 and made["train_samples"] == 0
    assert {row["file"] for row in table(tmp_path / "out")} == {
        str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*.jpg")}
    refused = run("python", 1, TRAIN, f"--data_dir={tmp_path}/mine-prepared", f"--output_dir={tmp_path}/run")
    assert refused.returncode == 1 and "so it is only for --mode=evaluate" in refused.stderr
