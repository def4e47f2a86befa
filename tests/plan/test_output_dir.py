"""What a training says before TensorFlow is imported about the run that it resumes, and where one without a folder
writes.
"""
import datetime
import os
import shlex
from types import SimpleNamespace

import pytest

from common.errors import UserError, one_line
from plan import output_dir
from plan.flags import parse
from tests.rigs.pictures import fill


@pytest.mark.parametrize(("flags", "earlier", "says"), [
    (["--precision=mixed_float16"], ("--persistent", "--nopersistent"), "was false and is now true"),
    (["--precision=mixed_float16", "--nopersistent_batch_norm"], ("--nopersistent", "--persistent"),
     "was true and is now false"),
    (["--precision=mixed_float16"], ("", ""), None),
    (["--precision=mixed_float16", "--resume=never"], ("--persistent", "--nopersistent"), None),
    (["--precision=float32"], ("--persistent", "--nopersistent"), None)])
def test_another_batch_norm_on_gpus_is_one_line(flags, earlier, says, tmp_path, capsys):
    settings = parse(["train.py", f"--output_dir={tmp_path}", *flags])
    (tmp_path / "flags.txt").write_text(settings.text.replace(*earlier))
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    output_dir.check(settings)
    lines = [line for line in capsys.readouterr().err.splitlines() if "--persistent_batch_norm" in line]
    assert [says in line for line in lines] == [True] * bool(says)


def test_a_longer_training_is_a_command_to_paste(tmp_path):
    """The command is read as typed: it has the run's flags, other epochs, and goes to another folder."""
    run = tmp_path / "a run"
    first = parse(["train.py", f"--output_dir={run}", "--model=keras:VGG16", "--pretrained", "--epochs=2", "--seed=7"])
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "flags.txt").write_text(first.text)
    again = ["train.py", f"--flagfile={run}/flags.txt", f"--output_dir={run}"]
    with pytest.raises(UserError, match="epochs was 2 and is now 5; --epochs=2 continues it; choose another"):
        output_dir.check(parse([*again, "--epochs=5"]))
    (run / "summary.json").write_text('{"advice": []}')  # of a training that has ended
    with pytest.raises(UserError, match="epochs was 2 and is now 1; choose another --output_dir, or start"):
        output_dir.check(parse([*again, "--epochs=1"]))
    with pytest.raises(UserError, match=r"epochs was 2.* and is now 5.*--resume=never") as error:
        output_dir.check(parse([*again, "--epochs=5"]))
    words = shlex.split(str(error.value).partition(" is: ")[2].partition("; run that")[0])
    assert words[:3] == ["uv", "run", "train.py"]
    longer = parse(words[2:])
    output_dir.check(longer)
    assert (longer.recipe.epochs, longer.recipe.seed, longer.run.output_dir, longer.run.init_checkpoint) == (
        3, 7, f"{run}-longer", f"{run}/checkpoints")  # two epochs and three make five


@pytest.mark.parametrize(("flags", "rate"), [
    ([], 0.0003), (["--freeze"], 0.003), (["--learning_rate=0.01"], 0.01), (["--optimizer=sgd"], 0.003)])
def test_going_on_from_weights_takes_the_rate_for_trained_ones(flags, rate, tmp_path):
    """In place of that for random ones in small_images.flags, which default_recipe replaces, too."""
    fill(tmp_path / "images", 4)
    words = ["train.py", f"--data_dir={tmp_path}/images", *flags]
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "flags.txt").write_text(parse(words).text)
    said = output_dir.from_weights(tmp_path / "run").partition(" is: ")[2].partition("; run that")[0]
    longer = parse(shlex.split(said)[2:]).recipe
    assert longer.learning_rate.values == [rate]
    if not flags:
        assert longer.learning_rate == parse([*words, f"--init_checkpoint={tmp_path}/run"]).recipe.learning_rate


@pytest.mark.parametrize("flags", [[], ["--output_dir=runs/mine"], ["--output_dir=runs"]])
def test_a_link_that_leads_nowhere_is_named(flags, tmp_path, monkeypatch):
    """Before TensorFlow is imported, and where a folder is created at last."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("/scratch/mine")
    says = "runs is a link to /scratch/mine, which does not exist; create that folder, or remove the link"
    with pytest.raises(UserError, match=f"^--output_dir: {tmp_path}/{says}$"):
        output_dir.check(parse(["train.py", *flags]))
    with pytest.raises(UserError, match=says), output_dir.made("convnet"):
        pass
    with pytest.raises(FileExistsError) as error:
        (tmp_path / "runs").mkdir(exist_ok=True)  # as other programs do
    assert one_line(error.value) == f"{tmp_path}/{says}"
    (tmp_path / "runs").unlink()
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=f"^--output_dir: {tmp_path}/runs is no folder; choose another one$"):
        output_dir.check(parse(["train.py", *flags]))


@pytest.mark.parametrize("is_left", ["flags.txt", "checkpoints/step-00000001"])
def test_an_evaluation_does_not_overwrite_a_run(is_left, tmp_path):
    """Whatever is left of it. A folder in it is no harm."""
    (tmp_path / "run" / is_left).mkdir(parents=True)
    if is_left == "flags.txt":
        (tmp_path / "run" / is_left).rmdir()
        (tmp_path / "run" / is_left).touch()
    (tmp_path / "flags.txt").touch()

    def check(folder):
        output_dir.check(parse(["train.py", "--mode=evaluate", f"--checkpoint={tmp_path}", f"--output_dir={folder}"]))

    with pytest.raises(UserError, match=f"{tmp_path}/run is the folder of a run.*, such as {tmp_path}/run/evaluation"):
        check(tmp_path / "run")
    check(tmp_path / "run" / "evaluation")


def test_two_trainings_that_start_in_one_second_with_one_number_have_two_folders(tmp_path, monkeypatch):
    """As in two containers with one disk. A folder stays if there is something in it."""
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 11, 28, 16, 30, 5)
    monkeypatch.setattr(output_dir, "datetime", SimpleNamespace(now=lambda: now))
    with output_dir.made("convnet") as first, output_dir.made("convnet") as second, output_dir.made("convnet") as third:
        name = f"20261128-163005-convnet-{os.getpid()}"
        assert [first, second, third] == [tmp_path / "runs" / f"{name}{more}" for more in ("", "-2", "-3")]
        assert all(folder.is_dir() for folder in (first, second, third))
        (second / "plan.json").touch()
    assert [*(tmp_path / "runs").iterdir()] == [second]
