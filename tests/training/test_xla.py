"""What --xla=auto compiles, and what it leaves."""
import json

import pytest
from conftest import DIGITS, ROOT, TINY, rows, run, train

from train import main
from training.weight_check import DIFFER

QUICK = (DIGITS, *TINY, "--epochs=2")


@pytest.mark.trainings
def test_clusters_are_compiled_and_the_exchange_is_left_out(tmp_path, monkeypatch):
    """Horovod's operations cannot be compiled: two workers that train alike show that they were not."""
    train(*QUICK, "--deterministic", f"--output_dir={tmp_path / 'plain'}", kind="mpirun", workers=2)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    done = run("mpirun", 2, ROOT / "train.py", *QUICK, "--deterministic", "--xla=auto",
               f"--output_dir={tmp_path / 'auto'}", cold=True)
    assert done.returncode == 0 and "Compiled cluster using XLA" in done.stderr, done.stderr[-3000:]
    assert DIFFER not in done.stderr
    for plain, compiled in zip(rows(tmp_path / "plain"), rows(tmp_path / "auto"), strict=True):
        for name in ("train_loss", "val_loss", "val_top1"):
            assert compiled[name] == pytest.approx(plain[name], rel=0.01), name


@pytest.mark.trainings
def test_a_runs_flags_mean_the_same_again(tmp_path):
    """A switch stands alone, has values, and is written as one."""
    for given, expected in ((["--xla"], "true"), (["--noxla"], "false"), (["--xla=auto"], "auto"), ([], "false")):
        folder = tmp_path / expected
        train(*QUICK, *given, "--epochs=1", "--data_dir=synthetic:64", "--batch_size=32", f"--output_dir={folder}")
        assert f"--xla={expected}\n" in (folder / "flags.txt").read_text()
        again = run("python", 1, ROOT / "train.py", f"--flagfile={folder}/flags.txt", "--dry_run")
        assert again.returncode == 0 and json.loads(again.stdout)["workers"] == 1
    done = run("python", 1, ROOT / "train.py", "--xla=maybe")
    assert done.returncode == 2 and "false|true|auto" in done.stderr


OWN = """
from model_zoo.convnet import convnet

def net(x, classes, batch_norm_momentum, seed):
    return convnet(x, classes, batch_norm_momentum, seed)
"""


def test_what_xla_cannot_do_deterministically_names_both_flags(tmp_path, capsys):
    """Max pooling's gradient, on any device. Of a network of one's own, only TensorFlow finds it out."""
    flags = ("--xla", "--deterministic", "--train_samples=100")
    for model in ("convnet", "resnet50", "keras:VGG16"):
        code = main(["train.py", "--dry_run", *flags, f"--model={model}"])
        [line] = capsys.readouterr().err.splitlines()
        assert code == 2 and "--xla " in line and "--deterministic" in line
    for more in ("--model=resnet20", "--model=convnet --xla=auto", "--model=convnet --nodeterministic",
                 "--model=keras:ResNetRS50"):
        assert main(["train.py", "--dry_run", *flags, *more.split()]) == 0
    (tmp_path / "mine.py").write_text(OWN)
    done = run("python", 1, ROOT / "train.py", DIGITS, *TINY, *flags[:2], "--model=mine:net", cwd=tmp_path)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert done.returncode == 1 and "deterministic XLA implementation. Use" in line  # TensorFlow's own reason
    assert "--xla or --deterministic" in line
