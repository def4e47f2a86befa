"""Checkpoints are whole or not there: damage, full and read-only disks, what is kept."""
import contextlib
import dataclasses
import errno
import functools
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, SmallDisk, environment, require_tool, rows, run, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import UserError
from common.run_folder import RunFolder, folder_of
from data.synthetic import synthetic_dataset
from distributed.world import World
from plan.flags import parse
from plan.values import Every
from reporting.run_log import RunLog
from tests.rigs import lacking
from tests.rigs.trainings import newest_step
from training.checkpoints import Checkpoints, write
from training.observer import Evaluation, Update
from training.restoring import FILES, MEANING, Damaged, describe, intact, load_model, read
from training.run import Training
from training.state import Progress, Snapshot
from training.weight_check import checksums, in_hexadecimal

RECIPE = {"model": "convnet", "momentum": 0.9, "exclude": ["gamma"]}


def snapshot(step: int, size: int = 1000, records=()) -> Snapshot:
    tensors = {"model/000/kernel": tf.constant(np.random.default_rng(step).normal(size=size), tf.float32),
               "optimizer/000/iteration": tf.constant(step, tf.int64)}
    return Snapshot(tensors, Progress(step=step, samples=128 * step, skipped=7, workers=2, seconds=0.1,
                                      records=[*records]))


VARIABLES = {"model/000/kernel": tf.Variable(tf.zeros(1000)), "optimizer/000/iteration": tf.Variable(0, dtype=tf.int64)}


def saved(folder, steps, top1=None, recipe=RECIPE) -> Checkpoints:
    """top1: of the evaluations, by step. One without a regular checkpoint is saved if it is the best so far."""
    checkpoints, records, top1 = Checkpoints(folder, recipe), [], top1 or {}
    folder.mkdir(parents=True, exist_ok=True)
    for step in sorted({*steps, *top1}):
        if is_best := top1.get(step, 0) > max((record["top1"] for record in records), default=0):
            records.append({"epoch": step / 10, "top1": top1[step], "seconds": 1.0})
        if step in steps:
            checkpoints.save(snapshot(step, records=records), step / 10, top1.get(step))
        elif is_best:
            checkpoints.save_best(snapshot(step, records=records), step / 10, top1[step])
    assert checkpoints.wait()
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def test_what_is_loaded_is_what_was_saved(tmp_path):
    saved(tmp_path, [3])
    loaded, made = Checkpoints(tmp_path, RECIPE).load(VARIABLES), snapshot(3)
    assert loaded.progress == made.progress and loaded.progress.workers == 2
    for name, tensor in made.tensors.items():
        np.testing.assert_array_equal(loaded.tensors[name], tensor.numpy())


def test_class_names_have_one_form_however_they_were_saved(tmp_path):
    """A training on folders of macOS goes on with those of Linux. A line end in a name shifts no list of them."""
    before = Checkpoints(tmp_path, RECIPE, classes=["cafe\N{COMBINING ACUTE ACCENT}", "oak\n"])
    before.save(snapshot(3), 0.3)
    assert before.wait()
    for described in (read(tmp_path / "step-00000003")[1], describe(tmp_path / "step-00000003")):
        assert described["classes"] == ["café", "oak\\n"]
    assert Checkpoints(tmp_path, RECIPE, classes=["café", "oak\\n"]).load(VARIABLES).progress.step == 3
    with pytest.raises(UserError, match="class 0 is 'café' in the checkpoint and 'cafe' in the dataset"):
        Checkpoints(tmp_path, RECIPE, classes=["cafe", "oak\\n"]).load(VARIABLES)


def test_a_snapshot_stays_while_training_goes_on():
    variable = tf.Variable(tf.ones(1000))
    kept = variable.read_value()
    variable.assign_add(tf.ones(1000))
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=1.0, delta=tf.ones(1000))
    assert float(tf.reduce_max(kept)) == 1.0


def test_a_checkpoint_is_replaced_only_by_one_that_stands(tmp_path, monkeypatch):
    """The disk fails when the new one is about to take its place."""
    saved(tmp_path, [3])
    rename = Path.rename

    def broken(path, target):
        if path.suffix == ".part":
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", broken)
    checkpoints = Checkpoints(tmp_path, RECIPE)
    checkpoints.save(dataclasses.replace(snapshot(3), tensors=snapshot(4).tensors), 0.3)
    assert not checkpoints.wait()
    monkeypatch.undo()
    kept = Checkpoints(tmp_path, RECIPE).load(VARIABLES)
    np.testing.assert_array_equal(kept.tensors["model/000/kernel"], snapshot(3).tensors["model/000/kernel"])
    (tmp_path / "step-00000003.old").mkdir()  # a process was killed before it removed this
    checkpoints.save(dataclasses.replace(snapshot(3), tensors=snapshot(4).tensors), 0.3)
    assert checkpoints.wait() and [*tmp_path.glob("step-*")] == [tmp_path / "step-00000003"]
    kept = Checkpoints(tmp_path, RECIPE).load(VARIABLES)
    np.testing.assert_array_equal(kept.tensors["model/000/kernel"], snapshot(4).tensors["model/000/kernel"])


def test_the_last_five_and_the_best_are_kept(tmp_path):
    checkpoints = saved(tmp_path, range(1, 10), top1={2: 0.5, 3: 0.9, 8: 0.7})
    assert names(tmp_path) == [f"step-{step:08}" for step in (3, 5, 6, 7, 8, 9)]
    assert (tmp_path / "best").resolve().name == "step-00000003"
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-00000009" / "variables")
    again = Checkpoints(tmp_path, RECIPE)
    again.load(VARIABLES)
    again.save(snapshot(10, records=[{"epoch": 1.0, "top1": 0.95}]), 1.0, top1=0.95)
    assert again.wait() and names(tmp_path) == [f"step-{step:08}" for step in (6, 7, 8, 9, 10)]
    assert (tmp_path / "best").resolve().name == "step-00000010"
    assert checkpoints.last_good(99).name == "step-00000009"


def test_the_best_is_saved_between_checkpoints_and_pushes_none_out(tmp_path):
    """Of two that are equal, it is the first, as best_epoch is. A resumed training keeps it."""
    scores = {11: 0.1, 12: 0.2, 13: 0.3, 21: 0.25, 25: 0.4, 31: 0.5, 33: 0.9, 34: 0.9, 50: 0.9, 55: 0.8}
    checkpoints = saved(tmp_path, range(10, 80, 10), scores)
    kept = [f"step-{step:08}" for step in (30, 33, 40, 50, 60, 70)]
    assert names(tmp_path) == kept and os.readlink(tmp_path / "best") == "step-00000033"
    best = {"epoch": 3.3, "top1": 0.9, "seconds": 1.0}
    assert checkpoints.of(best) == tmp_path / "step-00000033" and checkpoints.of(best | {"top1": 0.91}) is None
    again = Checkpoints(tmp_path, RECIPE)
    assert again.of(best) == tmp_path / "step-00000033"
    again.save(snapshot(80, records=[best]), 8.0)
    assert again.wait() and names(tmp_path) == [kept[1], *kept[2:], "step-00000080"]
    again.save(snapshot(80, records=[best]), 8.0)  # the next phase needs other workers
    again.save(snapshot(33, records=[best]), 3.3)
    assert again.wait() and again.of(best) == tmp_path / "step-00000033"


def test_of_better_ones_the_newest_waits_in_memory_while_the_disk_is_slow(tmp_path):
    """Training goes on: `save_best` returns while the disk is busy. A better one replaces the one that waits."""
    is_free = threading.Event()
    checkpoints = Checkpoints(tmp_path, RECIPE, functools.partial(is_free.wait, 20))
    checkpoints.save(snapshot(1), 0.1)
    waiting = []
    for step in (2, 3, 4):
        made = snapshot(step, records=[{"epoch": step / 10, "top1": step / 10}])
        waiting.append(weakref.ref(made))
        checkpoints.save_best(made, step / 10, step / 10)
    del made
    assert [one() is None for one in waiting] == [True, True, False] and names(tmp_path) == []
    is_free.set()
    assert checkpoints.wait() and names(tmp_path) == ["step-00000001", "step-00000004"]
    assert waiting[-1]() is None and (tmp_path / "best").resolve() == tmp_path / "step-00000004"


@pytest.mark.parametrize("is_extra", [False, True])
def test_the_best_that_could_not_be_written_is_tried_again(is_extra, tmp_path, capfd):
    """Until then, `best` leads to nothing that is less, but the best one on disk stays."""
    full = []

    def flush():
        if full:
            raise OSError(full.pop(), "no room")

    records = [{"epoch": 0.1, "top1": 0.5}, {"epoch": 0.2, "top1": 0.6}]
    checkpoints = Checkpoints(tmp_path, RECIPE, flush)
    checkpoints.save(snapshot(1, records=records[:1]), 0.1, 0.5)
    assert checkpoints.wait() and (tmp_path / "best").exists()
    full += [errno.EIO] * 2
    checkpoints.save_best(snapshot(2, records=records), 0.2, 0.6, is_extra)
    checkpoints.save(snapshot(3, records=records), 0.3)
    assert checkpoints.wait() and names(tmp_path) == ["step-00000001", "step-00000003"]
    assert checkpoints.of(records[1]) is None and not os.path.lexists(tmp_path / "best")
    assert capfd.readouterr().err.count("step-00000002 could not be written") == 2
    for step in range(4, 10):
        checkpoints.save(snapshot(step, records=records), step / 10)
    assert checkpoints.wait() and checkpoints.of(records[1]) == (tmp_path / "best").resolve()
    assert (tmp_path / "best").resolve() == tmp_path / "step-00000002"


def test_a_best_from_before_a_rollback_does_not_survive(tmp_path, capfd):
    """Neither the one on disk, whose weights were bad, nor one that waits in memory until the disk has room."""
    for is_written in (True, False):
        folder, problems, flushed = tmp_path / str(is_written), [], []

        def flush(problems=problems, flushed=flushed):
            flushed.append("before a write")
            if problems:
                raise problems[0]

        records = [{"epoch": 0.1, "top1": 0.5}, {"epoch": 0.3, "top1": 0.6}]
        checkpoints = Checkpoints(folder, RECIPE, flush)
        folder.mkdir()
        for step in (1, 2):
            checkpoints.save(snapshot(step, records=records[:1]), step / 10, 0.5 if step == 1 else None)
        checkpoints.wait()
        problems += [] if is_written else [OSError(errno.EIO, "broken")]
        checkpoints.save_best(snapshot(3, records=records), 0.3, 0.6)
        assert checkpoints.last_good(3).name == "step-00000002"
        problems.clear()
        flushed.clear()
        checkpoints.load(VARIABLES)
        checkpoints.save(snapshot(4, records=records[:1]), 0.4)
        assert checkpoints.wait() and len(flushed) == 1 and names(folder) == [f"step-{step:08}" for step in (1, 2, 4)]
        assert (folder / "best").resolve() == folder / "step-00000001"


def test_an_old_checkpoint_that_cannot_be_removed_stays(tmp_path):
    """A user has moved it to another disk, and left a link, which cannot be removed like a folder."""
    checkpoints = saved(tmp_path, range(1, 6))
    (tmp_path / "step-00000001").rename(tmp_path / "moved")
    (tmp_path / "step-00000001").symlink_to("moved")
    for step in (6, 7):
        checkpoints.save(snapshot(step), epoch=step / 10)
        assert checkpoints.wait()
    assert names(tmp_path) == [f"step-{step:08}" for step in (1, 3, 4, 5, 6, 7)]
    assert {path.name for path in (tmp_path / "moved").iterdir()} >= {"variables.index"}


def test_after_going_back_what_never_came_to_be_is_removed(tmp_path):
    checkpoints = saved(tmp_path, [1, 2, 3])
    assert checkpoints.last_good(3).name == "step-00000002"  # the weights of step 3 were bad before it
    for step in (10, 20, 15):
        checkpoints.save(snapshot(step), step / 10)
    assert checkpoints.wait()
    assert names(tmp_path) == [f"step-{step:08}" for step in (1, 2, 10, 15)]


@pytest.mark.parametrize("copy", ["step-00000002-before-change", "step-00000002.bak", "step-2", "step-00000002-a.part"])
def test_a_copy_that_a_user_has_made_is_left_alone(copy, tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "step-00000002").rename(tmp_path / copy)
    assert Checkpoints(tmp_path, RECIPE).load(VARIABLES).progress.step == 1
    saved(tmp_path, range(3, 10), top1={3: 0.5})
    assert read(tmp_path / copy)[1]["progress"]["step"] == 2
    assert names(tmp_path) == sorted([copy, *(f"step-{step:08}" for step in (3, 5, 6, 7, 8, 9))])


def test_a_checkpoint_that_was_broken_off_is_no_checkpoint(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "step-00000002.part").mkdir()
    (tmp_path / "step-00000002.part" / "variables.index").write_bytes(b"half")
    assert Checkpoints(tmp_path, RECIPE).load(VARIABLES).progress.step == 1
    saved(tmp_path, [3])
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def damages(path):
    """(what was done, a function that does it) for each file of a checkpoint: cut short, gone, a bit turned."""
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        yield f"{file.name} gone", file.unlink
        for length in (0, 1, len(content) // 2, len(content) - 1):
            yield f"{file.name} cut to {length}", lambda file=file, c=content[:length]: file.write_bytes(c)
        for offset in np.linspace(0, len(content) - 1, 25).astype(int):
            turned = bytearray(content)
            turned[offset] ^= 0x10
            yield f"{file.name}, byte {offset}", lambda file=file, c=bytes(turned): file.write_bytes(c)


def test_damage_is_noticed_wherever_it_is(tmp_path, capfd):
    saved(tmp_path, [1, 2])
    newest = tmp_path / "step-00000002"
    files = {file: file.read_bytes() for file in newest.iterdir()}
    for what, damage in damages(newest):
        damage()
        loaded = Checkpoints(tmp_path, RECIPE).load(VARIABLES)
        stderr = capfd.readouterr().err
        if loaded.progress.step == 2:  # a byte that means nothing, padding: then what was read is right
            assert "," in what
            np.testing.assert_array_equal(loaded.tensors["model/000/kernel"], snapshot(2).tensors["model/000/kernel"])
        else:
            told = "skipped: " + what.replace(" gone", " was not found") if " gone" in what else "damaged"
            assert str(newest) in stderr and told in stderr and len(stderr.splitlines()) == 1, (what, stderr)
        for file, content in files.items():
            file.write_bytes(content)
    assert read(newest)[1]["progress"]["step"] == 2


@pytest.mark.parametrize(("value", "name", "is_used"), [
    (np.nan, "model/000/kernel", False), (np.inf, "ema/000/kernel", False), (0.0, "model/000/kernel", True)])
def test_weights_with_damaged_values_are_noticed_however_they_come_in(value, name, is_used, tmp_path, capsys):
    """For a resume, --mode=evaluate, predict and export, and --init_checkpoint, which all read them here."""
    for step in (1, 2):
        tensors = snapshot(step).tensors | {"model/000/kernel": tf.ones([2, 500]), "ema/000/kernel": tf.ones([2, 500])}
        if step == 2:
            tensors[name] = tf.where(tf.range(500) < (1 if value else 500), value, tensors[name])
        write(tmp_path / f"step-0000000{step}", tensors, {"classes": [], "progress": {"step": step}})
    assert next(intact(tmp_path))[2]["progress"]["step"] == 1 + is_used
    problem = "may be damaged: all values of {} are 0" if is_used else (
        "is damaged and was skipped: {} has infinite or NaN values")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{tmp_path}/step-00000002 {problem.format(name)}")


def test_where_all_are_damaged_it_is_an_error(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "step-00000001" / "variables.index").write_bytes(b"")
    with pytest.raises(Damaged):
        read(tmp_path / "step-00000001")
    with pytest.raises(UserError, match="can be read; choose another --output_dir, or restore"):
        Checkpoints(tmp_path, RECIPE).load(VARIABLES)


@pytest.mark.parametrize("name", ["lr[0.1]", "[a-z]", "a]", "a*", "a?", "a\\b", "a\\", "a b", "50%", "a\nb", "{a,b}"])
def test_a_path_is_not_a_pattern(name, tmp_path, capfd):
    """TensorFlow found no file for some of these. The checkpoints were called damaged, and --resume=never deletes them.
    """
    saved(tmp_path / "a" / "b", [1])  # what some patterns match
    folder = tmp_path / name / "checkpoints"
    saved(folder, [1, 2], top1={1: 0.9, 2: 0.8})
    checkpoints = Checkpoints(folder, RECIPE)
    assert checkpoints.load(VARIABLES).progress.step == 2
    checkpoints.save(snapshot(3, records=[{"epoch": 0.1, "top1": 0.9}]), 0.3, top1=0.7)
    assert checkpoints.wait() and (folder / "best").resolve().name == "step-00000001"  # describes those on disk
    assert checkpoints.last_good(3).name == "step-00000002" and checkpoints.load(VARIABLES).progress.step == 2
    for given in (tmp_path / name, folder, folder / "step-00000002", folder / "best"):
        _, tensors, described = next(intact(given))
        np.testing.assert_array_equal(tensors["model/000/kernel"],
                                      snapshot(described["progress"]["step"]).tensors["model/000/kernel"])
    assert not capfd.readouterr().err


def test_damage_is_named_with_its_file(tmp_path, capfd):
    folder = tmp_path / "lr[0.1]"
    saved(folder, [1, 2])
    (folder / "step-00000002" / FILES[1]).write_bytes(b"")
    assert Checkpoints(folder, RECIPE).load(VARIABLES).progress.step == 1
    stderr = capfd.readouterr().err
    assert f"{folder}/step-00000002 is damaged" in stderr and "/proc/" not in stderr


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_in_place_of_a_file_is_named(name, tmp_path, capfd):
    """Of a clone without Git LFS."""
    saved(tmp_path, [1, 2])
    (tmp_path / "step-00000002" / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    assert next(intact(tmp_path))[2]["progress"]["step"] == 1
    assert capfd.readouterr().err.endswith(
        f"skipped: {name} is a Git LFS pointer; `git lfs pull` in its repository fetches the file\n")


def test_what_could_not_be_opened_is_neither_damaged_nor_to_be_deleted(tmp_path, capfd):
    """A missing file, and one that cannot be opened: a folder, because root may open any file."""
    saved(tmp_path, [1])
    index = tmp_path / "step-00000001" / FILES[0]
    index.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="choose another --output_dir, or restore the files") as raised:
        Checkpoints(tmp_path, RECIPE).load(VARIABLES)
    stderr = capfd.readouterr().err
    assert stderr.endswith(f"skipped: {FILES[0]} was not found\n") and "never" not in str(raised.value)
    index.mkdir()
    with pytest.raises(IsADirectoryError, match=FILES[0]):
        Checkpoints(tmp_path, RECIPE).load(VARIABLES)
    index.rmdir()
    (tmp_path / "moved").rename(index)
    assert Checkpoints(tmp_path, RECIPE).load(VARIABLES).progress.step == 1 and not capfd.readouterr().err


@pytest.mark.parametrize(("variables", "message"), [
    ({"model/000/kernel": tf.Variable(tf.zeros(999))}, r"model/000/kernel is \(1000,\) in the checkpoint and \(999,\)"),
    ({"model/001/bias": tf.Variable(0.0)}, "model/001/bias is missing in the checkpoint"),
    ({"optimizer/000/iteration": None}, "optimizer/000/iteration is .* in the checkpoint and missing here"),
])
def test_other_variables_are_refused_by_name(tmp_path, variables, message):
    saved(tmp_path, [1])
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path, RECIPE).load({k: v for k, v in (VARIABLES | variables).items() if v is not None})


def rewritten(path, change):
    """Changes the description in a checkpoint."""
    tensors = {name: tf.constant(value) for name, value in read(path)[0].items()}
    described = read(path)[1]
    change(described)
    tensors["description"] = tf.constant(json.dumps(described))
    tf.raw_ops.SaveV2(prefix=str(path / "variables"), tensor_names=list(tensors), tensors=list(tensors.values()),
                      shape_and_slices=[""] * len(tensors))


def test_a_checkpoint_that_lacks_a_newer_flag_is_continued(tmp_path):
    saved(tmp_path, [3])
    assert Checkpoints(tmp_path, RECIPE | {"label_smoothing": 0.0}).load(VARIABLES).progress.step == 3


@pytest.mark.parametrize(("change", "version"), [
    (lambda described: described.pop("meaning"), 1),
    (lambda described: described.update(meaning=MEANING + 1), MEANING + 1)])
def test_a_checkpoint_whose_flags_mean_something_else_is_refused(tmp_path, change, version):
    """It would mix two trainings in silence. Its weights can be used, which is another matter."""
    path = saved(tmp_path, [3]).newest
    rewritten(path, change)
    with pytest.raises(UserError, match=rf"step-00000003 .*\(version {version}, here {MEANING};") as refused:
        Checkpoints(tmp_path, RECIPE).load(VARIABLES)
    assert "--resume=never" not in str(refused.value)  # which would delete what the older code can still continue
    model = SimpleNamespace(variables=[tf.Variable(tf.zeros(1000), name="kernel")], _flatten_layers=lambda **_: [])
    assert load_model(str(path), model)["progress"]["step"] == 3
    assert float(tf.norm(model.variables[0])) > 0


def test_another_recipe_is_refused_by_flag(tmp_path):
    saved(tmp_path, [1])
    for name, value in (("momentum", 0.8), ("exclude", [])):
        with pytest.raises(UserError, match=f"{name} was"):
            Checkpoints(tmp_path, RECIPE | {name: value}).load(VARIABLES)


SCHEDULED = ("--learning_rate=2", "--batch_size=0:64,1:128", "--lr_boundaries=30,60", "--image_size=32",
             "--weight_decay=1e-4")


@pytest.mark.parametrize("before", [
    "--learning_rate=2.0", "--learning_rate=0:2", "--batch_size=0.0:64,1.0:128", "--lr_boundaries=30.0,6e1",
    "--image_size=0:32", "--weight_decay=0.0001"])
def test_a_schedule_written_otherwise_is_the_same_training(tmp_path, before):
    written, now = (parse(["train.py", *SCHEDULED, "--lr_schedule=multistep", *more]) for more in ([before], []))
    assert written.recipe == now.recipe
    saved(tmp_path, [1], recipe=written.identity)
    assert Checkpoints(tmp_path, now.identity).load(VARIABLES).progress.step == 1


@pytest.mark.parametrize("before", ["--learning_rate=0:2,30:1", "--learning_rate=2.001", "--batch_size=64",
                                    "--lr_boundaries=30", "--exclude=gamma"])
def test_another_schedule_is_another_training(tmp_path, before):
    written, now = (parse(["train.py", *SCHEDULED, "--lr_schedule=multistep", *more]) for more in ([before], []))
    saved(tmp_path, [1], recipe=written.identity)
    with pytest.raises(UserError, match=f"{before[2:].partition('=')[0]} was"):
        Checkpoints(tmp_path, now.identity).load(VARIABLES)


def test_models_of_the_same_kind_have_the_same_names():
    import model_zoo
    from training.state import named

    first, second = (named("model", model_zoo.create_model("resnet20", 10, 32).variables) for _ in range(2))
    assert list(first) == list(second) and len(first) == len({v.ref() for v in first.values()}) > 90


@pytest.fixture
def small_disk():
    with SmallDisk("size=1m") as disk:
        yield disk


def test_a_disk_that_fills_keeps_the_checkpoint_before(small_disk, capfd):
    checkpoints = Checkpoints(small_disk.path, RECIPE)
    checkpoints.save(snapshot(1, 60_000), 0.1)
    assert checkpoints.wait()
    for step in (2, 3):
        checkpoints.save(snapshot(step, 200_000), 0.2)
        assert not checkpoints.wait()
        stderr = capfd.readouterr().err
        assert f"step-0000000{step} could not be written" in stderr and "newest checkpoint is step-00000001" in stderr
        assert len(stderr.splitlines()) == 1 and names(small_disk.path) == ["step-00000001"]
    assert read(small_disk.path / "step-00000001")[1]["progress"]["step"] == 1
    checkpoints.save(snapshot(4, 60_000), 0.3)  # there is room again
    assert checkpoints.wait() and names(small_disk.path) == ["step-00000001", "step-00000004"]


def test_older_checkpoints_make_room_on_a_full_disk(small_disk, capfd):
    """Of 1 MB, four fit. The newest and the best stay, whatever comes."""
    records, folder = [{"epoch": 0.1, "top1": 0.5}], small_disk.path
    checkpoints = Checkpoints(folder, RECIPE)
    for step in range(1, 7):
        checkpoints.save(snapshot(step, 60_000, records), step / 10, 0.5 if step == 1 else None)
        assert checkpoints.wait()
    assert names(folder) == [f"step-{step:08}" for step in (1, 4, 5, 6)] and not capfd.readouterr().err
    checkpoints.save(snapshot(7, 200_000, records), 0.7)
    assert not checkpoints.wait() and names(folder) == ["step-00000001", "step-00000006"]
    assert "step-00000007 could not be written: no space left on device" in capfd.readouterr().err


@pytest.mark.trainings
def test_training_on_a_full_disk_says_so_and_goes_on_when_there_is_room(small_disk):
    small_disk.remount("size=2m")  # a checkpoint has 1.2 MB
    flags = ("--model=convnet", "--epochs=3", "--checkpoint_every=1", "--deterministic",
             f"--output_dir={small_disk.path}/run")
    done = run("python", 1, ROOT / "train.py", *flags)
    lines = [line for line in done.stderr.splitlines() if "train.py: " in line]
    about = [line for line in lines if "train.py: the checkpoint " in line]  # the report's own line may come before
    assert done.returncode == 1 and "could not be written" in about[0] and "the newest checkpoint is" in about[0]
    assert "no space left" in about[0] and "the last checkpoint could not be written; see the line above" in lines[-1]
    assert "Traceback" not in done.stderr and newest_step(small_disk.path / "run") >= 12
    reached = newest_step(small_disk.path / "run")
    small_disk.remount("size=32m")
    done = train(*flags)
    assert f"resumed after step {reached} of" in done.stderr
    assert [row["epoch"] for row in rows(small_disk.path / "run")] == [1, 2, 3]


def fill(disk, left: int = 0) -> None:
    """Fills a disk, but for so many bytes."""
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - left)


def logged(folder, epochs, at=lambda epoch: None) -> None:
    """Logs evaluations, whose trust ratios fill several pages. at: called before each."""
    log, layers = RunLog(RunFolder(folder)), {f"conv2d_{one}/kernel": [1.5, 0.25, 1e-3] for one in range(200)}
    log.start(SimpleNamespace(folder=folder, plan={"steps": 40}, flags_text="", progress=Progress()))
    for epoch in epochs:
        log.step(Update(epoch, epoch, 250, 0.1, 0.9, 2.0, 0.5))
        at(epoch)
        log.evaluation(Evaluation({"epoch": epoch, "samples": 1000 * epoch, "text": "x" * 3000}, layers, {}, None))
    log.end({"val_top1": 0.5})
    log.close()


@pytest.mark.parametrize("pages", range(8))
def test_no_row_is_lost_on_a_disk_that_fills_and_empties(pages, small_disk, tmp_path, capfd):
    """It is full before, or becomes full in, the evaluation after epoch 2, and has room again after epoch 4."""
    disk = small_disk.path

    def at(epoch):
        if epoch == 2:
            fill(disk, 4096 * pages)
        if epoch in (4, 5):
            assert all(rows(disk / "run", path.name) for path in (disk / "run").glob("*.jsonl"))  # no torn
        if epoch == 5:
            (disk / "filler").unlink()

    for folder in (disk / "run", tmp_path / "run"):
        folder.mkdir()
        logged(folder, range(1, 7), at if folder.parent == disk else lambda epoch: None)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {path.name for path in (disk / "run").iterdir()} and len(files) == 7
    for name in files - {"steps.jsonl"}:
        assert (disk / "run" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert [row["step"] for row in rows(disk / "run", "steps.jsonl")] == [*range(1, 7)]
    [line] = capfd.readouterr().err.splitlines()
    assert "cannot be written: No space left on device; training continues" in line


FILLS = """import contextlib, os

class Fills:
    def start(self, run):
        self.disk = run.folder.parent
    def step(self, update):
        if update.number == 5:
            fill(self.disk)
        if update.number in (16, 40):
            os.truncate(self.disk / "filler", 0)  # frees the disk, even if a process that starts has the file open
            (self.disk / "filler").unlink()
    def evaluation(self, evaluation):
        if evaluation.row["epoch"] == 3:
            fill(self.disk)
"""


@pytest.mark.trainings
def test_a_disk_that_is_full_for_a_while_does_not_end_training(small_disk, tmp_path):
    """From step 5 to 16, and from the evaluation after step 34 to step 40, of 44."""
    small_disk.remount("size=16m")
    (tmp_path / "fills.py").write_text(FILLS + inspect.getsource(fill))
    done = train("--model=convnet", "--epochs=4", "--optimizer=lars", "--learning_rate=0.5", "--log_trust_ratios",
                 "--checkpoint_every=1", "--observer=fills:Fills", f"--output_dir={small_disk.path}/run", cwd=tmp_path)
    folder, errors = small_disk.path / "run", done.stderr
    found = rows(folder)
    for name, epochs in (("metrics", [1, 2, 3, 4]), ("times", [1, 2, 3, 4]), ("trust_ratios", [0, 1, 2, 3, 4])):
        assert [row["epoch"] for row in rows(folder, f"{name}.jsonl")] == epochs
    assert [row["step"] for row in rows(folder, "steps.jsonl")] == [*range(44)]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_top1"] == max(row["val_top1"] for row in found)
    events = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors("loss/validation")] == [row["samples"] for row in found]
    assert len([*(folder / "tensorboard").glob("events.*")]) == 1
    assert "Traceback" not in errors and newest_step(folder) == 44
    assert 1 <= errors.count("cannot be written: No space left on device; training continues") <= 2
    assert errors.count("TensorBoard's events cannot be written") <= 2
    assert "step-00000034 could not be written" in errors


LACKING = """
import os, sys
from pathlib import Path
import tensorflow as tf
from common import files
from plan import output_dir
from common.run_folder import RunFolder, folder_of
from training.checkpoints import Checkpoints
from training.state import Progress, Snapshot

for case in sys.argv[2:]:
    run, records = RunFolder(Path(sys.argv[1], case)), []
    print(f"= {case}", file=sys.stderr)
    files.NAMED.clear()
    os.environ["LACKS"] = case
    with output_dir.locked(run.path):
        run.append("metrics.jsonl", {"epoch": 1})
        checkpoints = Checkpoints(run.path / "checkpoints", {}, run.flush)
        for step in range(1, 8):
            records = records or [{"epoch": 0.2, "top1": 0.5}] if step > 1 else []
            snapshot = Snapshot({"model/000/kernel": tf.fill([9], float(step))}, Progress(step, records=records))
            os.environ["LACKS"] = "" if step == 4 else case  # as on another computer, for a while
            checkpoints.save(snapshot, step / 10, 0.5 if step == 2 else None)
            assert checkpoints.wait() or step != 4
            os.environ["LACKS"] = case
try:
    os.environ["LACKS"] = "flock:13"  # EACCES
    with files.locked(run.path):
        print("locked")
except BlockingIOError:
    print("taken")
"""
LACKED = [f"fsync:{a} fsync_file:{a} symlink:{b} flock:{c}" for a, b, c in (
    (errno.EINVAL, errno.EPERM, errno.ENOLCK), (errno.EOPNOTSUPP, errno.EOPNOTSUPP, errno.EINVAL),
    (errno.ENOSYS, errno.EROFS, errno.EOPNOTSUPP), (errno.EPERM, errno.EPROTO, errno.ENOSYS),
    (errno.EBADF, errno.EBADF, errno.ENOLCK))]
LACKED += [f"fsync:{a} symlink:{a} flock:{errno.ENOLCK}" for a in (errno.EACCES, errno.ESTALE, 524)]  # Linux's ENOTSUPP
BROKEN = {f"fsync:{errno.EIO}": "Input/output error", f"fsync:{errno.ENOSPC}": "no space left on device; make room",
          f"fsync:{errno.EDQUOT}": "disk quota exceeded; make room", f"fsync_file:{errno.ESTALE}": "Stale file handle"}


@pytest.mark.trainings
def test_what_a_file_system_lacks_is_a_line_and_what_breaks_is_an_error(tmp_path):
    """Without fsync, symbolic links and locks, checkpoints are written, old ones removed, and `best` is found."""
    preloaded = environment() | {"LD_PRELOAD": str(lacking.library(tmp_path, require_tool("g++")))}
    done = subprocess.run([sys.executable, "-c", LACKING, tmp_path, *LACKED, *BROKEN], env=preloaded, text=True,
                          capture_output=True)
    assert done.returncode == 0 and done.stdout == "taken\n", done.stderr
    said = {case: lines for case, *lines in map(str.splitlines, f"\n{done.stderr}".split("\n= ")[1:])}
    for case in LACKED:
        folder = tmp_path / case / "checkpoints"
        assert names(folder) == [f"step-{step:08}" for step in range(2, 8)]
        assert [line.partition(" has no ")[2].partition(" (")[0] for line in said[case]] == [
            "locks", "fsync", "symbolic links"]
        (folder.parent / "flags.txt").touch()
        assert (folder / "best").is_file() and folder_of(str(folder / "best")) == folder.parent
        assert next(intact(folder / "best"))[0] == folder / "step-00000002"
        saved(folder, [8], {8: 0.6}, {})  # as on another computer
        assert os.readlink(folder / "best") == "step-00000008"
    for case, problem in BROKEN.items():
        assert all(problem in line for line in said[case])  # of seven saves and of the best one's second
        assert len(said[case]) == 7 and names(tmp_path / case / "checkpoints") == ["step-00000002", "step-00000004"]


def test_best_replaces_a_copy_of_it(tmp_path):
    """A copy of a run may have a folder in place of the link, or a file of whatever kind."""
    saved(tmp_path, [1], {1: 0.5})
    (tmp_path / "best").unlink()
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "best")
    saved(tmp_path, [2], {2: 0.6})
    assert os.readlink(tmp_path / "best") == "step-00000002"
    for content in (b"", b"step-00000009", b"\0" * 9999, b"\xff" * 9999, b"\n"):
        (tmp_path / "best").unlink()
        (tmp_path / "best").write_bytes(content)
        assert [*intact(tmp_path / "best")] == []


def test_rows_are_on_disk_before_the_checkpoint_that_counts_them(tmp_path, capfd):
    written = []

    def flush():
        written.append(names(tmp_path))
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(tmp_path, RECIPE, flush)
    for step in (1, 2, 3):
        checkpoints.save(snapshot(step), 0.1)
    assert checkpoints.wait() and "step-00000002 could not be written" in capfd.readouterr().err
    assert written == [[], ["step-00000001"], ["step-00000001"]] and names(tmp_path) == [
        "step-00000001", "step-00000003"]


def test_a_disk_that_becomes_read_only(small_disk):
    small_disk.remount("ro")
    done = run("python", 1, ROOT / "train.py", "--model=convnet", f"--output_dir={small_disk.path}/run")
    assert done.returncode == 1 and "--output_dir" in done.stderr and len(done.stderr.splitlines()) == 1
    checkpoints = Checkpoints(small_disk.path, RECIPE)
    checkpoints.save(snapshot(1), 0.1)
    assert not checkpoints.wait()


def test_newest_first_from_a_run_its_checkpoints_or_one_of_them(tmp_path):
    saved(tmp_path / "checkpoints", [1, 2])
    for path, first in ((tmp_path, 2), (tmp_path / "checkpoints", 2), (tmp_path / "checkpoints" / "step-00000001", 1)):
        assert next(intact(path))[2]["progress"] == dataclasses.asdict(snapshot(first).progress)
    assert list(itertools.islice(intact(tmp_path / "nowhere"), 1)) == []


SLOW = """
import sys, threading, time, types
import train
from training import checkpoints, run

is_far, write, written, first = threading.Event(), checkpoints.write, [], []

def slowly(path, snapshot, about):
    if not written:
        assert is_far.wait(300), "training waits for the disk"
    written.append(path)
    write(path, snapshot, about)

class Counted(checkpoints.Checkpoints):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        first.append(self)

class Far:
    def step(self, update):
        if update.number == 24:
            is_far.set()
            while not first or first[0].is_writing:  # the disk is free before the next checkpoint is due
                time.sleep(0.01)

run.Checkpoints, checkpoints.write, sys.modules["far"] = Counted, slowly, types.SimpleNamespace(Far=Far)
code = train.main(["train.py", "--observer=far:Far", *sys.argv[1:]])
if written:
    print(*[path.name for path in written], code, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.trainings
def test_a_slow_disk_delays_checkpoints_but_not_steps(tmp_path):
    """The first checkpoint is not written before the 25th step. One that was due before then is saved later, after the
    best evaluation, which waited in memory.
    """
    done = run("mpirun", 2, "-c", SLOW, "--model=convnet", "--epochs=3", "--batch_size=96", "--learning_rate=0.5",
               "--checkpoint_every=0.5", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    *written, code = done.stderr.splitlines()[-1].split()
    steps = [int(name.removeprefix("step-")) for name in written]
    due = {8, 15, 23, 30, 38}  # half epochs of 1,437 samples
    assert steps[:2] == [8, 15] and steps[2] > 24 and steps[-1] == 44 and code == "0"
    assert set(steps[2:-1]) - due, steps
    assert len(rows(tmp_path)) == 3
    check_best(tmp_path)


def check_best(folder) -> None:
    """What summary.json and `best` name has the weights that metrics.jsonl records of the best evaluation."""
    summary, found = json.loads((folder / "summary.json").read_text()), rows(folder)
    best = max(found, key=lambda row: row["val_top1"])  # the first one
    tensors, _ = read(folder / summary["best_checkpoint"])
    assert (summary["best_top1"], summary["best_epoch"]) == (best["val_top1"], best["epoch"])
    model = {name: tf.constant(tensors[name]) for name in sorted(tensors) if name.startswith("model/")}
    assert in_hexadecimal(checksums(model)["model"]) == best["weights"]
    assert (folder / "checkpoints" / "best").resolve() == (folder / summary["best_checkpoint"]).resolve()


def test_auto_is_each_epoch_but_not_twice_a_minute(tmp_path):
    """These epochs take no minute: the last step, and the best evaluation, the first, because the rate then is 0."""
    train("--model=convnet", "--epochs=3", "--batch_size=128", "--warmup=none", "--learning_rate=0:0.5,1:0",
          "--momentum=0", f"--output_dir={tmp_path}")
    assert names(tmp_path / "checkpoints") == ["step-00000012", "step-00000033"]
    assert json.loads((tmp_path / "summary.json").read_text())["best_checkpoint"] == "checkpoints/step-00000012"
    check_best(tmp_path)
    every = Every.parse("auto")
    assert every.is_due(1436, 1437, 1437) and not every.is_due(0, 1436, 1437)
    assert every.least_minutes == 1 and not every.has_passed(1e9) and Every.parse("1").least_minutes == 0


@pytest.mark.parametrize("is_new", [True, False])
def test_never_resuming_deletes_nothing_that_another_worker_goes_on_with(tmp_path, is_new):
    """In elastic training, rank 0 may be a worker that has just come."""
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}")
    settings = parse(["train.py", "--resume=never", f"--output_dir={tmp_path}"])
    made = Training(settings, synthetic_dataset("synthetic:100"), World(), None, (None, None), None)
    for updates in (False, True):
        made._folder = RunFolder(tmp_path)
        with contextlib.ExitStack() as held:
            made._open_folder(held, is_new)
            left = [(tmp_path / name).exists() for name in ("checkpoints/step-00000007", "metrics.jsonl")]
            assert left == [not is_new] * 2
            log = RunLog(made._folder)
            log.start(SimpleNamespace(folder=tmp_path, plan={"steps": 9}, flags_text="", progress=Progress()))
            if updates:
                log.step(Update(0, 0.0, 8, 0.1, 0.9, 2.0, 0.5))
        left = [(tmp_path / name).exists() for name in ("checkpoints/step-00000007", "plan.json")]
        assert left == ([not updates, updates] if is_new else [True, True])  # without one, the earlier run is back
    assert {path.name for path in tmp_path.glob(".*")} == {".lock"}


def test_a_checkpoint_from_before_0_9_is_one_line(tmp_path):
    """It lacks the names of the classes. Nobody is told to start over, which would delete it."""
    write(tmp_path / "step-00000003", snapshot(3).tensors, {
        "meaning": MEANING, "recipe": RECIPE, "epoch": 1.0, "top1": None, "progress": {"step": 3}})
    for reads in (lambda: Checkpoints(tmp_path, RECIPE).load(VARIABLES), lambda: next(intact(tmp_path))):
        with pytest.raises(UserError, match=r"written by a Bigbatch before 0\.9\.0, which ") as raised:
            reads()
        assert "--resume=never" not in str(raised.value)
