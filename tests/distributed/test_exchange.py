"""Trainings on four workers in a torus and hierarchical, against a ring; the plan's word on the exchange; flags."""
import json
import subprocess

import numpy as np
import pytest
from conftest import ROOT, TINY, environment, launcher, rows, run, train, weights

from common.errors import UsageError
from plan.flags import parse
from tests.rigs.bn_train import PROGRAM

SHORT = ("--model=bn_convnet", "--epochs=1", "--image_size=16", "--batch_size=128",
         "--micro_batch_size=16",  # two a step
         "--batch_norm_statistics=exact",
         "--learning_rate=0.1", "--warmup=none")  # at the recipe's rate, rounding grows a thousandfold in 11 steps
TORUS = ("--allreduce=torus", "--fusion_mb=0.02")  # of 0.1 MB of gradients
TWO_NODES = ("-H", "localhost:2,127.0.0.1:2")  # of this machine, for horovodrun
QUICK = (*TINY, "--epochs=1")


@pytest.fixture(scope="module")
def trained(train_once):
    """A function of a launcher and flags that gives the folder of a training on four workers, made once."""
    return lambda kind, *flags: train_once(*SHORT, *flags, kind=kind, workers=4, program=PROGRAM)


def differences(ours, theirs) -> list:
    """Of each variable of the model, the norm of the difference in parts of its own."""
    ours, theirs = weights(ours), weights(theirs)
    assert ours.keys() == theirs.keys()
    return [np.linalg.norm(ours[name] - theirs[name]) / (np.linalg.norm(theirs[name]) or 1)
            for name in ours if name.startswith("model/")]


def exchange(folder) -> dict:
    return json.loads((folder / "plan.json").read_text())["exchange"]


@pytest.mark.trainings
def test_a_torus_trains_the_weights_of_a_ring(trained):
    """Accumulation and exact statistics included; only the order of sums differs, in 11 steps of LARS."""
    ring, torus = trained("horovodrun"), trained("horovodrun", *TORUS, "--deterministic")
    assert exchange(ring)["allreduce"] == "ring" and exchange(ring)["grid"] is None
    assert (exchange(torus)["allreduce"], exchange(torus)["grid"]) == ("torus", [2, 2])
    assert len(found := differences(torus, ring)) >= 17
    assert np.median(found) < 1e-4 and max(found) < 1e-2
    assert rows(torus)[-1]["train_loss"] == pytest.approx(rows(ring)[-1]["train_loss"], rel=1e-5)


@pytest.mark.trainings
def test_hierarchical_on_two_nodes_trains_the_weights_of_a_ring(train_once, tmp_path):
    flags = *QUICK, "--batch_size=128", "--deterministic", "--micro_batch_size=32"
    *horovodrun, python = launcher("horovodrun", 4)
    done = subprocess.run([*horovodrun, *TWO_NODES, python, ROOT / "train.py", *flags, "--allreduce=hierarchical",
                           "--fusion_mb=0.05", f"--output_dir={tmp_path}"], env=environment(), text=True,
                          capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]
    plan, ring = exchange(tmp_path), train_once(*flags, kind="mpirun", workers=4)
    assert (plan["allreduce"], plan["grid"], plan["by"]) == ("hierarchical", [2, 2], "Horovod process sets")
    assert max(differences(tmp_path, ring)) == 0  # sums of integers have no order
    assert rows(tmp_path)[-1]["train_loss"] == pytest.approx(rows(ring)[-1]["train_loss"], rel=1e-5)


@pytest.mark.campaign  # test_same_bits.py has a torus, too
def test_deterministic_is_the_same_bits_twice_in_a_torus(trained, tmp_path):
    again = tmp_path / "again"
    train(*SHORT, *TORUS, "--deterministic", f"--output_dir={again}", kind="horovodrun", workers=4,
          program=PROGRAM, timeout=900)
    ours, theirs = weights(again), weights(trained("horovodrun", *TORUS, "--deterministic"))
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.trainings
def test_float16_on_the_wire_trains_nearly_the_same(trained):
    half = trained("mpirun", "--allreduce=torus", "--torus_grid=1x4", "--compression=fp16")
    assert exchange(half)["grid"] == [1, 4]
    assert 0 < np.median(differences(half, trained("horovodrun"))) < 1e-3
    assert rows(half)[-1]["train_loss"] == pytest.approx(rows(trained("horovodrun"))[-1]["train_loss"], rel=1e-4)


@pytest.mark.trainings
def test_a_prime_number_of_workers_goes_in_a_ring_and_says_so_once(tmp_path):
    done = train(*QUICK, "--batch_size=126", "--allreduce=torus", f"--output_dir={tmp_path}",
                 kind="horovodrun", workers=3)
    assert done.stderr.count("note: 3 workers can only form a ring, because 3 is prime; training goes on as with "
                             "--allreduce=ring") == 1
    assert exchange(tmp_path)["allreduce"] == "ring"


def planned(*flags, workers=12):
    sizes = f"--workers={workers}", f"--batch_size={workers * 32}"
    done = run("python", 1, ROOT / "train.py", "--dry_run", *sizes, *flags)
    return done.returncode, json.loads(done.stdout)["exchange"] if done.stdout else done.stderr


def test_the_plan_has_the_grid_and_why():
    code, found = planned("--allreduce=torus", workers=3456)
    assert code == 0 and found["grid"] == [72, 48] and "4 workers per node" in found["why"]
    assert "3455" in found["why"] and found["by"] == "Horovod process sets"
    assert planned("--allreduce=torus", "--torus_grid=6x2")[1]["grid"] == [6, 2]
    assert planned()[1]["allreduce"] == "ring" and planned(workers=1)[1]["allreduce"] == "none"
    found = planned("--allreduce=hierarchical", "--workers_per_node=3")[1]
    assert (found["allreduce"], found["grid"]) == ("hierarchical", [3, 4])


def test_a_grid_that_does_not_fit_is_an_error_that_lists_those_that_do():
    code, stderr = planned("--allreduce=torus", "--torus_grid=5x2")
    assert code == 1 and stderr.count("\n") == 1
    assert "5x2 does not fit 12 workers" in stderr and "12x1, 6x2, 4x3, 3x4, 2x6, 1x12" in stderr


def test_hierarchical_that_is_impossible_is_one_line(monkeypatch):
    code, stderr = planned("--allreduce=hierarchical", "--workers_per_node=5")
    assert code == 1 and stderr.count("\n") == 1
    assert "12 workers are not a multiple of 5 per node" in stderr
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UsageError, match="--elastic rules out; use --allreduce=torus or ring"):
        parse(["train.py", "--elastic", "--allreduce=hierarchical"])


@pytest.mark.parametrize("flags", [["--torus_grid=4"], ["--torus_grid=0x4"], ["--torus_grid=4X2"], ["--fusion_mb=0"],
                                   ["--allreduce=tree"], ["--workers_per_node=4"]])
def test_flags_that_make_no_sense(flags):
    with pytest.raises(UsageError):
        parse(["train.py", *flags])


def test_nodes_with_different_numbers_of_workers_have_to_be_given_a_grid():
    """Four workers say that they are of a node of 3, as three of them would be."""
    program = ("import os, sys; os.environ['HOROVOD_LOCAL_SIZE'] = '3'; "
               "os.execv(sys.executable, [sys.executable, 'train.py', *sys.argv[1:]])")
    done = run("mpirun", 4, "-c", program, "--allreduce=torus", *QUICK, timeout=300)
    assert done.returncode == 1 and "give a grid, such as --torus_grid=4x2" in done.stderr
    assert "Traceback" not in done.stderr
