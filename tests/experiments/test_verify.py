"""experiments.verify: a run is reproduced to the bit from one of its checkpoints; one that was edited is not."""
import dataclasses
import json
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import DIGITS, ROOT, TINY, environment, printed_json, rows, run, train, warm_python, weights

from common.errors import UserError
from experiments.verify import flags_for, newest_with_evaluation, verified
from plan.flags import parse
from tests.rigs.making import write_shards
from training.checkpoints import write
from training.restoring import MEANING, read

pytestmark = pytest.mark.trainings

STEPS = (12, 23, 33)  # after each epoch


@pytest.fixture(scope="module")
def two(in_format, tmp_path_factory):
    """A run of two workers, whose checkpoints also hold what --log_trust_ratios and --log_noise_scale keep."""
    folder = tmp_path_factory.mktemp("two")
    train(DIGITS, f"--data_dir={in_format('tfrecord')}", "--model=convnet", "--deterministic", "--epochs=3",
          "--evaluate_every=1", "--checkpoint_every=1", "--log_trust_ratios", "--log_noise_scale",
          f"--output_dir={folder}", kind="mpirun", workers=2)
    return folder


@pytest.fixture
def copy(two, tmp_path):
    return shutil.copytree(two, tmp_path / "copy", symlinks=True)


def verify(*words):
    """The exit code, the JSON and the lines on standard error."""
    done = run("python", 1, "-m", "experiments.verify", *words)
    return done.returncode, printed_json(done), done.stderr.splitlines()


def files(folder) -> dict:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_run_of_two_workers_is_reproduced_on_one_and_left_as_it_is(two):
    before = files(two)
    code, result, said = verify(two, "--workers=1")
    assert (code, result) == (0, {"from_epoch": 2, "to_epoch": 3, "reproduced": True})
    assert said[-1] == "epoch 2 to 3 reproduced to the bit"
    assert files(two) == before


def test_the_checksum_is_that_of_the_weights_in_the_checkpoint(two):
    """Of all variables of the model, in the order of their names, which begin with their numbers."""
    bits = np.concatenate([value.reshape(-1).view(np.int32) for name, value in sorted(weights(two).items())
                           if name.startswith("model/")]).astype(np.int64)
    total = np.sum(bits.view(np.uint64) * np.arange(1, 2 * len(bits), 2, dtype=np.uint64))
    assert rows(two)[-1]["weights"] == f"{int(total):016x}"
    assert len({row["weights"] for row in rows(two)}) == 3


def test_an_edited_metric_is_found_from_the_checkpoint_given_on_the_runs_two_workers(copy):
    """Training ends after the evaluation, an epoch before the run's own end."""
    first, second, third = rows(copy)
    edited = second["val_loss"] * (1 + 1e-12)
    (copy / "metrics.jsonl").write_text("".join(
        json.dumps(row) + "\n" for row in (first, second | {"val_loss": edited}, third)))
    made = json.loads((copy / "run.json").read_text())
    made["versions"] |= {"DALI": "2.3.0"}
    (copy / "run.json").write_text(json.dumps(made))
    code, result, said = verify(copy / "checkpoints" / f"step-{STEPS[0]:08}")
    assert (code, result) == (1, {"from_epoch": 1, "to_epoch": 2, "reproduced": False,
                                  "differs": {"val_loss": [edited, second["val_loss"]]},
                                  "versions": ["DALI 2.3.0 (now 2.4.0)"]})
    message = (f"epoch 1 to 2 not reproduced: val_loss was {edited} and is now {second['val_loss']}; "
               "the run was made with DALI 2.3.0 (now 2.4.0)")
    assert said[-1].endswith(message)  # prterun can lose the end of the line before
    assert not any(line.startswith("epoch 3/3") for line in said)


def test_an_edited_weight_is_found(copy):
    path = copy / "checkpoints" / f"step-{STEPS[1]:08}"
    tensors, described = read(path)
    name = next(name for name in sorted(tensors) if name.startswith("model/"))
    tensors[name].flat[0] += 1e-3
    write(path, tensors, described)
    code, result, _ = verify(copy, "--workers=1")
    assert code == 1 and {"weights", "val_loss"} <= result["differs"].keys()


def test_an_edited_record_is_found(two, digit_records, tmp_path):
    """Another label of one of 1,437 training images."""
    (image, label), *others = digit_records["train"]
    write_shards("tfrecord", digit_records | {"train": [(image, (label + 1) % 10), *others]}, tmp_path)
    code, result, _ = verify(two / "checkpoints", f"--data_dir={tmp_path}", "--workers=1")
    assert code == 1 and {"weights", "train_loss"} <= result["differs"].keys()


def test_a_run_with_rollbacks_is_reproduced(tmp_path, monkeypatch):
    """It diverges 19 steps after a checkpoint, goes back to it, and from the next one diverges once more.

    The evaluation after the first of them is then the one of other samples. It comes when verify has diverged, too.
    After the first epoch, the network hardly changes: no evaluation is better, and so has a checkpoint of its own.
    """
    monkeypatch.setenv("POISONED_SAMPLES", f"{(23 + 17) * 128},{(49 + 19) * 128}")
    poison = "--observer=tests.rigs.poison:Poison"
    done = train(DIGITS, *TINY, "--deterministic", "--epochs=8", "--evaluate_every=1", "--checkpoint_every=2", poison,
                 "--learning_rate=0:0.02,1:1e-7", "--on_divergence=rollback", f"--output_dir={tmp_path}")
    assert done.stderr.count("rolled back to") == 2
    found = rows(tmp_path)
    assert [row.get("skipped", 0) for row in found] == [0] * 2 + [19 * 128] * 2 + [(19 + 51 - 45) * 128] * 4
    for step, epochs in ((23, (2, 3)), (45, (4, 5))):
        code, result, _ = verify(tmp_path / "checkpoints" / f"step-{step:08}", poison)
        assert (code, result) == (0, dict(zip(("from_epoch", "to_epoch", "reproduced"), (*epochs, True), strict=True)))
    monkeypatch.setenv("POISONED_SAMPLES", "-1")
    code, result, said = verify(tmp_path / "checkpoints" / "step-00000023", poison)
    assert code == 1 and result["differs"]["skipped"] == [19 * 128, None]
    shown = [line.partition("  ")[0] for line in said]
    assert "epoch 4/8" in shown and "epoch 8/8" not in shown  # it ends long before the last


def test_a_request_to_stop_ends_the_training_too(two):
    process = subprocess.Popen([warm_python(), "-m", "experiments.verify", str(two)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    folder = next(Path(line.split()[1]) for line in process.stderr if line.startswith("run: "))
    assert folder.is_dir()
    process.send_signal(signal.SIGTERM)
    output, said = process.communicate(timeout=300)
    assert process.returncode == 75 and not output
    assert said.splitlines()[-1] == "experiments.verify: stopped on request"
    assert not folder.parent.exists()


@pytest.mark.parametrize(("words", "code", "message"), [
    ([], 2, "give the folder of one run"), (["a", "b"], 2, "give the folder of one run"),
    (["a", "--epochz=3"], 2, "epochz"), (["a", "--workers=0"], 2, "workers"),
    (["/nowhere"], 1, "/nowhere does not exist"),
])
def test_bad_input_is_one_line(words, code, message):
    done = run("python", 1, "-m", "experiments.verify", *words)
    assert done.returncode == code and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("experiments.verify: ") and not done.stdout


def test_what_cannot_be_verified_is_an_error(two, copy):
    first, second, third = rows(two)
    with pytest.raises(UserError, match=r"no evaluation follows a checkpoint in .*; train with --checkpoint_every=1"):
        newest_with_evaluation(f"{two}/checkpoints/step-{STEPS[-1]:08}", [first, second, third])
    newest = copy / "checkpoints" / f"step-{STEPS[1]:08}"
    tensors, described = read(newest)
    write(newest, tensors, described | {"meaning": MEANING - 1})
    with pytest.raises(UserError, match=rf"another meaning \(version {MEANING - 1}, here {MEANING}"):
        newest_with_evaluation(str(newest), rows(two))
    recorded = (copy / "flags.txt").read_text()
    for before, after, said in (("--deterministic=true", "--deterministic=false", "without --deterministic"),
                                ("--noelastic", "--elastic", "with --elastic")):
        assert before in recorded
        (copy / "flags.txt").write_text(recorded.replace(before, after))
        with pytest.raises(UserError, match=f"was trained {said}: it does not give the same bits again"):
            verified(str(copy), None, [])


def test_other_workers_need_what_gives_them_the_same_bits(two):
    settings = parse(["train.py", f"--flagfile={two}/flags.txt"])
    plan = json.loads((two / "plan.json").read_text())
    recorded = newest_with_evaluation(f"{two}/checkpoints", rows(two))
    assert flags_for(settings, plan, recorded, 4) == ["--micro_batch_size=64"]  # 4 would take 32 by themselves
    same = parse(["train.py", f"--flagfile={two}/flags.txt", "--deterministic=same_workers"])
    assert flags_for(same, plan, recorded, 2) == []
    sizes = plan | {"phases": [*plan["phases"], plan["phases"][0] | {"micro_batch_size": 32}]}
    by_file = dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, order="file"))
    for one, planned in ((same, plan), (settings, sizes), (by_file, plan)):
        with pytest.raises(UserError, match="it was trained on 2, and this is 1; see --deterministic, --order"):
            flags_for(one, planned, recorded, 1)
