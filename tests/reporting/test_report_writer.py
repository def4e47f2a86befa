"""What the report's thread writes beside a training: files against counts by hand, and what happens when it fails."""
import base64
import csv
import io
import itertools
import json
import re
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from PIL import Image

from common import VERSION
from common.files import write_json
from common.run_folder import RunFolder
from common.streams import Errors
from common.version import git_revision
from data.dataset import open_dataset
from plan.flags import parse
from reporting import about, outcomes, report_writer
from reporting.report_writer import ReportWriter
from reporting.run_log import RunLog
from tests.rigs.run_files import flags_text, plan, row
from training.checkpoints import Checkpoints
from training.observer import Evaluation, RunInfo, Update
from training.outcomes import Outcomes
from training.state import Progress, Snapshot

RECIPE = ROOT / "recipes" / "sony_1811.05233" / "table3-experiment1.flags"


@pytest.fixture
def info(tmp_path, digits):
    """A run of 3 epochs on the digits that has just started."""
    progress = Progress()
    write_json(tmp_path / "plan.json", plan(3))
    (tmp_path / "flags.txt").write_text(flags_text(3))
    return RunInfo(tmp_path, plan(3), {}, flags_text(3), RECIPE, open_dataset(digits), {"node1": 1}, progress)


@pytest.fixture
def found(digits):
    """Made-up outcomes of all validation samples: every third is predicted as one class too high."""
    dataset, random = open_dataset(digits), np.random.default_rng(0)
    labels = np.array([label for _, label in dataset.validation.kind.records(
        dataset.validation.paths[0], dataset.validation.entries[0], np.arange(360))])
    predicted = np.where(np.arange(360) % 3 == 0, (labels + 1) % 10, labels)
    return Outcomes(*np.stack([labels, predicted, *random.random((3, 360))]).astype(np.float32))


def test_confusion_and_worst_errors(found, digits):
    found.losses[[33, 34]] = np.nan, 100.0  # a loss that is not a number is the worst; 34 is classified rightly
    made = outcomes.outcomes_json(found, open_dataset(digits), 2)
    assert made["epoch"] == 2 and made["classes"] == [str(one) for one in range(10)]
    for label, predicted, count in made["confusion"]:
        assert count == sum(pair == (label, predicted) for pair in zip(*found.pairs, strict=True))
    assert sum(count for *_, count in made["confusion"]) == 360
    wrong = [number for number in range(0, 360, 3) if number != 33]
    assert [one["sample"] for one in made["worst"]] == [33, *sorted(wrong, key=lambda one: -found.losses[one])[:11]]
    assert all(one["predicted"] == (one["label"] + 1) % 10 for one in made["worst"])
    for one in made["worst"]:
        assert one["probability"] == found.probabilities[one["sample"]]
    json.dumps(made["worst"][1:], allow_nan=False)


def test_the_figures_of_each_class_are_in_a_table(info, found):
    """Every third image of a class is predicted as the next one."""
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(info)
    writer.evaluation(Evaluation(row(1), {}, {}, found))
    writer.end({})
    writer.close()
    with (info.folder / "classes.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    labels, predicted = found.pairs
    assert [one["class"] for one in read] == [str(label) for label in range(10)]
    for label, one in enumerate(read):
        both = int(np.sum((labels == label) & (predicted == label)))
        counts = int(np.sum(labels == label)), int(np.sum(predicted == label)), both
        assert tuple(int(one[name]) for name in ("images", "predicted", "correct")) == counts
        assert [float(one[name]) for name in ("recall", "precision")] == pytest.approx([both / of for of in counts[:2]])


@pytest.mark.parametrize(("evaluated", "kept"), [(1000, None), (2000, 2.0)])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_figures_of_an_evaluation_that_was_taken_back_go(is_resumed, evaluated, kept, info, found):
    """By a rollback, or a resume, to a checkpoint with one evaluation or with both."""
    best = {"epoch": evaluated // 1000, "top1": row(evaluated // 1000)["val_top1"], "seconds": 1.0}
    progress = Progress(step=9, evaluated=evaluated, evaluations=evaluated // 1000, records=[best])
    files = RunFolder(info.folder)
    observers = RunLog(files), ReportWriter(files)
    for observer in observers:
        observer.start(info)
    for epoch in (1, 2):
        for observer in observers:
            observer.evaluation(Evaluation(row(epoch), {}, {}, found))
    if is_resumed:
        for observer in observers:
            observer.close()
        files = RunFolder(info.folder)
        observers = RunLog(files), ReportWriter(files)
        for observer in observers:
            observer.start(replace(info, progress=progress))
    else:
        observers[1]._thread.submit(observers[1]._draw).result()
        assert (info.folder / "classes.csv").exists()
        for observer in observers:
            observer.rewind(progress)
    for observer in observers:
        observer.close()
    made = [RunFolder(info.folder).read("outcomes.json").get("epoch"), (info.folder / "classes.csv").exists()]
    assert made == [kept, bool(kept)]
    assert ("Confusion" in (info.folder / "report.html").read_text()) == bool(kept)


def test_the_figures_are_those_of_the_best_evaluation_also_after_a_resume(info, found):
    """The second of three is the best; then training goes on from the first, whose outcomes its checkpoint has."""
    files, other = RunFolder(info.folder), found._replace(predicted=found.labels)  # which has no errors
    first, second, third = (row(epoch, val_top1=top1) for epoch, top1 in ((1, 0.5), (2, 0.75), (3, 0.625)))
    writer = ReportWriter(files)
    writer.start(info)
    for one, given in ((first, found), (second, other), (third, found)):
        files.append("metrics.jsonl", one)
        writer.evaluation(Evaluation(one, {}, {}, given))
    writer.close()
    made = files.read("outcomes.json")
    assert made["epoch"] == 2 and not made["worst"] and sum(label == of for label, of, _ in made["confusion"]) == 10
    with (info.folder / "predictions.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [one["predicted"] for one in rows] == [one["label"] for one in rows] and len(rows) == 360
    assert [float(one["probability_1"]) for one in rows] == pytest.approx(other.probabilities, abs=1e-6)
    page = (info.folder / "report.html").read_text()
    assert "validation top-1, best, epoch 2</dt><dd>75%" in page and "last epoch</dt><dd>62%" in page
    assert "After epoch 2, the best, 0 of 360 validation images are classified wrongly" in page
    best = {"epoch": 1, "top1": 0.5, "seconds": 1.0}
    checkpoints = Checkpoints(info.folder / "checkpoints", {})
    checkpoints.save(Snapshot({"a": tf.zeros(3)}, Progress(step=4, records=[best])), 1, 0.5, found)
    assert checkpoints.wait()
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(replace(info, progress=Progress(step=4, evaluated=1000, evaluations=1, records=[best])))
    writer.close()
    made = files.read("outcomes.json")
    assert made["epoch"] == 1 and len(made["worst"]) == 12
    with (info.folder / "classes.csv").open(newline="") as file:
        assert sum(int(one["correct"]) for one in csv.DictReader(file)) == 240


def test_the_pictures_are_those_of_the_samples(found, digits, digit_records, in_format):
    """In a single file, and in several whose records are read in another way."""
    for folder in (digits, in_format("lmdb")):
        dataset = open_dataset(folder)
        some = Outcomes(*(column[:dataset.validation.samples] for column in found))
        for one in outcomes.outcomes_json(some, dataset, 1)["worst"]:
            encoded, label = digit_records["validation"][one["sample"]]
            shown = Image.open(io.BytesIO(base64.b64decode(one["image"].removeprefix("data:image/jpeg;base64,"))))
            original = Image.open(io.BytesIO(encoded)).convert("RGB")
            assert shown.size == original.size and label == one["label"] and one["width"] == original.width
            assert np.abs(np.asarray(shown, float) - np.asarray(original, float)).mean() < 6


def test_large_pictures_become_small_and_damaged_ones_are_left_out():
    saved = io.BytesIO()
    Image.new("L", (1000, 500)).save(saved, "PNG")
    made = outcomes.thumbnail(saved.getvalue())
    assert Image.open(io.BytesIO(base64.b64decode(made["image"].partition(",")[2]))).size == (128, 64)
    assert made["width"] == 1000 and outcomes.thumbnail(saved.getvalue()[:60]) is None


def test_run_json_holds_the_papers_figure(info):
    made = about.about(info)
    assert made["recipe"]["reported"] == "top-1 75.03 %; 224 seconds on 2,176 V100"
    assert made["recipe"]["row"] == "table 3, experiment 1" and made["recipe"]["flags"]["warmup_epochs"] == "34"
    assert made["dataset"] == {"folder": str(info.dataset.folder), "format": "tfrecord", "classes": 10,
                               "train_samples": 1437, "validation_samples": 360,
                               "validation_content": info.dataset.validation_content}
    assert made["hosts"] == {"node1": 1}
    assert (made["versions"]["bigbatch"], made["versions"]["NumPy"]) == (VERSION, np.__version__)


def test_the_recipe_is_the_first_flagfile_or_the_default(tmp_path):
    (tmp_path / "flags.txt").write_text("--data_dir=digits\n--epochs=80\n")
    settings = parse(["train.py", "--epochs=60", f"--flagfile={RECIPE}", f"--flagfile={tmp_path}/flags.txt"])
    assert settings.source.file == RECIPE and not settings.source.is_default
    settings = parse(["train.py", "--flagfile", f"{tmp_path}/flags.txt"])
    assert about.recipe(settings.source.file)["reported"] is None  # the flags of a run report nothing
    settings = parse(["train.py"])
    assert settings.source.is_default and settings.source.file == ROOT / "recipes" / "digits.flags"


def test_where_each_flag_comes_from(tmp_path, digits):
    """A second file of flags, an alias, and what fits the default recipe to the dataset count, too."""
    (tmp_path / "flags.txt").write_text("--mixup=0.2\n--noxla\n")
    origins = parse(["train.py", "--epochs", "60", "-lars_exclude=gamma", f"--flagfile={RECIPE}",
                     f"--flagfile={tmp_path}/flags.txt", "--nonesterov"]).source.origins
    assert [name for name, origin in origins.items() if origin == "command line"] == ["epochs", "nesterov", "exclude"]
    assert origins["mixup"] == origins["xla"] == origins["warmup_epochs"] == "recipe" and "seed" not in origins
    origins = parse(["train.py", f"--data_dir={digits}"]).source.origins
    assert origins["data_dir"] == "command line" and origins["batch_size"] == origins["optimizer"] == "recipe"


def test_the_git_revision(tmp_path):
    assert git_revision(tmp_path) is None
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], text=True, capture_output=True, check=True).stdout.strip()
    assert git_revision(tmp_path) == {"revision": head, "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path)["changed"]
    (tmp_path / "package").mkdir()
    assert git_revision(tmp_path / "package") is None  # installed below another project


def test_a_whole_training(info, found, capsys):
    """The page is complete after `close`."""
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(replace(info, images=lambda number, size: (
        np.full((number, 32, 32, 3), 200, np.uint8), [f"class {one}" for one in range(number)])))
    writer.step(Update(0, 0.0, 256, 1.0, 0.9, 2.0, 0.1))
    for epoch in (1, 2, 3):
        with open(info.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row(epoch)) + "\n")
        writer.evaluation(Evaluation(row(epoch), {}, {}, found))
    write_json(info.folder / "summary.json", row(3) | {"epochs": 3, "world_size": 1, "advice": []})
    writer.end({})
    writer.close()
    assert capsys.readouterr().err == f"report: {info.folder}/report.html\n"
    page = (info.folder / "report.html").read_text()
    assert "<dd>50%</dd>" in page and "120 of 360 validation images" in page and "In progress" not in page
    assert "75.03" in page and "Training images" in page
    assert re.findall(r"<figcaption>(class \d+)</figcaption>", page) == [f"class {one}" for one in range(16)]
    resumed = ReportWriter(RunFolder(info.folder))
    resumed.start(replace(info, images=lambda number, size: 1 / 0))
    resumed.close()
    assert json.loads((info.folder / "run.json").read_text())["sample_classes"][15] == "class 15"
    assert Image.open(info.folder / "samples.jpg").size == (8 * 64, 2 * 64)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("report")]


@pytest.mark.parametrize(("name", "order"), [("tfrecord", "global"), ("lmdb", "file"), ("recordio", "file")])
def test_a_validation_without_an_error_is_shown_to_the_end(name, order, in_format, info, found, capsys):
    dataset = open_dataset(in_format(name)).in_order(order) if order == "file" else info.dataset
    found = Outcomes(*(column[:dataset.validation.samples] for column in found._replace(predicted=found.labels)))
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(replace(info, dataset=dataset))
    writer.evaluation(Evaluation(row(1), {}, {}, found))
    (info.folder / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    write_json(info.folder / "summary.json", row(1) | {"epochs": 3, "world_size": 1, "advice": []})
    writer.end({})
    writer.close()
    assert capsys.readouterr().err == f"report: {info.folder}/report.html\n"
    made, page = (info.folder / "outcomes.json").read_text(), (info.folder / "report.html").read_text()
    assert json.loads(made)["worst"] == []
    assert sum(count for *_, count in json.loads(made)["confusion"]) == dataset.validation.samples
    assert f"0 of {dataset.validation.samples} validation images" in page
    assert "In progress" not in page and "refresh" not in page


def test_a_page_without_its_pictures_still_says_how_the_run_ended(info, found, capsys):
    """The validation images have gone."""
    gone = replace(info.dataset, validation=replace(info.dataset.validation, paths=(info.folder / "gone.tfrecord",)))
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(replace(info, dataset=gone))
    writer.evaluation(Evaluation(row(1), {}, {}, found))
    write_json(info.folder / "summary.json", row(1) | {"epochs": 3, "world_size": 1, "advice": []})
    writer.end({})
    writer.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "outcomes.json could not be written: " in lines[0] and "gone.tfrecord" in lines[0]
    assert "In progress" not in (info.folder / "report.html").read_text()


def test_the_page_and_the_log_of_updates_follow_the_training(info, monkeypatch):
    """Without an evaluation. At most one drawing in twice EVERY, and with a drawing that costs a lot, none but it."""
    drawn, files = [], RunFolder(info.folder)
    monkeypatch.setattr(report_writer, "EVERY", 0.2)
    monkeypatch.setattr(report_writer, "SHARE", 1.0)
    write = report_writer.write_report
    monkeypatch.setattr(report_writer, "write_report", lambda folder: (drawn.append(time.monotonic()), write(folder)))
    observers = RunLog(files), ReportWriter(files)
    for observer in observers:
        observer.start(info)

    def trained_until(is_enough):
        for number in itertools.count(len(files.rows("steps.jsonl"))):
            for observer in observers:
                observer.step(Update(number, number / 1000, 256, 1.0, 0.9, 2.0, 0.1))
            if is_enough():
                return
            time.sleep(0.01)

    trained_until(lambda: len(drawn) >= 4)
    assert all(after - before >= 0.39 for before, after in itertools.pairwise(drawn[1:4]))
    page = (info.folder / "report.html").read_text()
    assert "So far: training loss 2, training top-1 10.0%" in page
    assert len((info.folder / "steps.jsonl").read_text().splitlines()) > 20
    monkeypatch.setattr(report_writer, "SHARE", 1e-9)
    began = time.monotonic()
    trained_until(lambda: time.monotonic() > began + 2)
    assert len(drawn) <= 6  # a drawing was under way, and another one was asked for
    for observer in observers:
        observer.close()


def test_drawings_that_wait_are_dropped_and_training_does_not(info, found, monkeypatch):
    """28 evaluations return while a drawing is blocked. One drawing of the newest follows, in 10 s or at the end."""
    drawn, is_blocked, is_released = [], threading.Event(), threading.Event()

    def draw(folder):
        written = folder / "outcomes.json"
        drawn.append(json.loads(written.read_text())["epoch"] if written.exists() else None)
        is_blocked.set()
        assert is_released.wait(300)

    monkeypatch.setattr(report_writer, "write_report", draw)
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(info)
    assert is_blocked.wait(300)
    for epoch in range(1, 29):
        writer.evaluation(Evaluation(row(epoch / 10), {}, {}, found))
    assert drawn == [None]
    is_released.set()
    writer.close()
    assert drawn == [None, 2.8]


def test_drawings_are_seconds_apart(info, found, monkeypatch):
    """The first evaluation is drawn at once. A later drawing waits for its time, and not for another evaluation."""
    drawn, is_drawn = [], threading.Semaphore(0)
    monkeypatch.setattr(report_writer, "EVERY", 0.5)
    monkeypatch.setattr(report_writer, "write_report", lambda _: drawn.append(time.monotonic()) or is_drawn.release())
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(info)
    for epoch in (1, 2):
        assert is_drawn.acquire(timeout=300)
        writer.evaluation(Evaluation(row(epoch), {}, {}, found))
    assert is_drawn.acquire(timeout=300) and drawn[2] - drawn[1] >= 0.5
    writer.close()
    assert len(drawn) == 3


def test_a_failure_is_one_line_and_training_goes_on(info, found, capsys):
    (info.folder / "plan.json").unlink()
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(replace(info, images=lambda number, size: 1 / 0))
    writer.step(Update(0, 0.0, 256, 1.0, 0.9, 2.0, 0.1))
    for epoch in (1, 2):
        writer.evaluation(Evaluation(row(epoch), {}, {}, found))
    writer.end({})
    writer.close()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("bigbatch: report.html could not be written: ") and "plan.json" in line


def test_the_run_says_that_messages_were_lost(info, monkeypatch):
    """Those of a training whose standard error is on a full disk, and which then ends with an error."""
    monkeypatch.setattr(Errors, "problem", "")
    with Errors("/dev/full", "w") as error:
        writer = ReportWriter(RunFolder(info.folder))
        writer.start(info)
        assert error.write(b"message") == 7
        try:
            raise ValueError("training diverged")
        except ValueError:
            writer.close()
    made = json.loads((info.folder / "run.json").read_text())
    assert made["standard_error"] == "partly lost: no space left on device" and made["stopped"] == "training diverged"


def test_a_training_that_ends_early_says_why(info, capsys):
    writer = ReportWriter(RunFolder(info.folder))
    writer.start(info)
    try:
        raise ValueError("training diverged at <step 3>")
    except ValueError:
        writer.close()
    page = (info.folder / "report.html").read_text()
    assert "training diverged at &lt;step 3&gt;" in page and "refresh" not in page
    assert capsys.readouterr().err == f"report: {info.folder}/report.html\n"


def test_single_updates_are_logged_and_taken_back(info):
    log = RunLog(RunFolder(info.folder))
    log.start(info)
    for number in range(6):
        log.step(Update(number, number / 4, 256, 0.1 * number, 0.9, 2.0, 0.1))
    log.evaluation(Evaluation(row(1), {}, {}, None))
    log.step(Update(6, 1.5, 256, 0.6, 0.9, float("nan"), 0.1))
    log.rewind(Progress(step=5, seconds=1.0))
    log.step(Update(5, 1.25, 128, 0.7, 0.9, float("nan"), 0.1))
    log.close()
    logged = [json.loads(line) for line in (info.folder / "steps.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged] == [0, 1, 2, 3, 4, 5]
    assert logged[-1]["batch_size"] == 128 and logged[-1]["loss"] is None and logged[0]["seconds"] < 60
    with open(info.folder / "steps.jsonl", "a") as file:
        file.write('{"step": 6, "ep')  # the process was killed as it wrote
    info.plan["steps"] = 5000
    info.progress.step = 4
    log = RunLog(RunFolder(info.folder))
    log.start(info)
    for number in range(4, 16):
        log.step(Update(number, number / 4, 256, 0.1, 0.9, 2.0, 0.1))
    log.close()
    logged = [json.loads(line) for line in (info.folder / "steps.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged] == [0, 1, 2, 3, 5, 10, 15]  # about 1,000 of 5,000
