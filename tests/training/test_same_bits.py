"""--deterministic: weights, moments, statistics and metrics do not depend on the number of workers."""
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import DIGITS, rows, start, train

from tests.rigs.bn_train import PROGRAM
from tests.rigs.trainings import differences
from tests.training.test_resume import newest_step, stopped
from training.restoring import intact

BASE = (DIGITS, "--model=bn_convnet", "--micro_batch_size=8", "--batch_norm_span=auto", "--warmup=none",
        "--deterministic", "--epochs=2")
GROWING = (*BASE, "--batch_size=0:96,1:192", "--image_size=0:12,1:16", "--batch_norm_statistics=exact",
           "--ema_decay=0.9", "--mixup=0.4", "--cutmix=1", "--checkpoint_every=0.3",
           "--augmentation=reflect_crop_alternate_flip", "--class_weights=0.5", "--repeats=3", "--evaluation_views=6")
STRIKES_BACK = ("--rand_augment=m6-n2-mstd0.5-inc1", "--loss=binary_cross_entropy")  # of arXiv:2110.00476
MOVING = (*BASE, "--batch_size=120", "--optimizer=lars", "--batch_norm_span=4", "--checkpoint_every=0.3",
          "--label_smoothing=0.1", "--log_trust_ratios", *STRIKES_BACK, "--model=resnet10_narrow", "--image_size=16",
          "--drop_path=0.3", "--mixup=0.1", "--class_weights=balanced", "--repeats=3", "--evaluation_views=6")
MUON = "--optimizer=muon", "--learning_rate=0.05", "--weight_decay=0.1"
MORE = {  # for the campaign: workers, flags
    "LARS, moving statistics of groups": ("mpirun", (2, 3, 4, 6), (*MOVING[len(BASE):], "--batch_size=96")),
    "a torus": ("mpirun", (4, 6), ("--batch_size=96", "--allreduce=torus")),
    "float16, LAMB": ("horovodrun", (2, 4, 8), ("--batch_size=128", "--optimizer=lamb", "--learning_rate=0.01",
                                                "--precision=mixed_float16")),
    "a torus, Muon": ("mpirun", (4, 6), ("--batch_size=96", *MUON, "--allreduce=torus")),
    "float16, Muon": ("horovodrun", (2, 4, 8), ("--batch_size=128", *MUON, "--precision=mixed_float16")),
    "the noise scale": ("mpirun", (3, 9), ("--batch_size=72", "--log_noise_scale")),
    "ResNet-20": ("horovodrun", (2, 4, 8), ("--batch_size=256", "--model=resnet20", "--micro_batch_size=16",
                                            "--drop_path=0.3", *STRIKES_BACK)),
}


@pytest.mark.parametrize("flags", [
    pytest.param((*BASE, "--batch_size=96", "--epochs=1", "--mixup=0.4", "--ema_decay=0.9"), id="one batch and size"),
    pytest.param(GROWING, id="that grow", marks=pytest.mark.trainings)])
def test_two_workers_make_the_bits_of_one(flags, tmp_path):
    """Averaged weights, mixup, dropout. Then batches and images that grow, exact statistics, CutMix, three crops."""
    train(*flags, f"--output_dir={tmp_path / '1'}", program=PROGRAM)
    train(*flags, f"--output_dir={tmp_path / '2'}", kind="horovodrun", workers=2, program=PROGRAM)
    assert differences(tmp_path / "1", tmp_path / "2") == []
    found = rows(tmp_path / "2")
    assert "ema_val_top1" in found[0]
    if flags is GROWING:
        assert [row["samples"] for row in found] == [14 * 96 + 192, 14 * 96 + 7 * 192]  # a step into the next phase
        assert [row["batch_size"] for row in found] == [192, 192] and "ema_views_val_top1" in found[0]


@pytest.mark.trainings
def test_stopped_on_three_workers_and_resumed_on_one(tmp_path):
    """LARS, moving statistics over groups of 4 samples, RandAugment of three copies, stochastic depth, binary
    cross-entropy.
    """
    flags = (*MOVING, "--epochs=1")
    train(*flags, f"--output_dir={tmp_path / '1'}", program=PROGRAM)
    folder = tmp_path / "3 and 1"
    assert stopped(folder, 3, flags, step=4) == 75
    assert 4 <= newest_step(folder) < 11
    assert start(folder, 1, flags, PROGRAM).wait(300) == 0
    assert differences(tmp_path / "1", folder) == []
    assert ", on 1 worker instead of 3" in Path(f"{folder}.log").read_text()
    ours, theirs = ((one / "trust_ratios.jsonl").read_text() for one in (tmp_path / "1", folder))
    assert ours == theirs


@pytest.mark.trainings
def test_muon_makes_the_same_bits_on_1_2_and_4_workers_and_after_a_stop(tmp_path):
    """With clipped gradients, averaged weights and a rate that changes; four workers stop, and one goes on."""
    flags = (*BASE, *MUON, "--batch_size=96", "--clip_norm=1", "--ema_decay=0.9", "--checkpoint_every=0.3")
    one, two, folder = (tmp_path / name for name in ("1", "2", "4 and 1"))
    train(*flags, f"--output_dir={one}", program=PROGRAM)
    train(*flags, "--share_orthogonalization=false", f"--output_dir={two}", kind="mpirun", workers=2, program=PROGRAM)
    assert stopped(folder, 4, flags, step=24) == 75 and newest_step(folder) < 30
    shares = [json.loads((run / "plan.json").read_text())["shares_orthogonalization"] for run in (one, two, folder)]
    assert shares == [False, False, True]
    assert start(folder, 1, flags, PROGRAM).wait(300) == 0
    assert differences(one, two) == differences(one, folder) == []
    _, tensors, _ = next(intact(folder))
    kernel, = (value for name, value in tensors.items() if name.startswith("model/") and value.shape == (3, 3, 32, 64))
    assert np.sqrt(np.square(kernel).mean()) == pytest.approx(0.2, rel=1e-5)  # its constraint


@pytest.mark.campaign
@pytest.mark.parametrize("case", MORE)
def test_any_number_of_workers_makes_the_same_bits(case, tmp_path):
    kind, sizes, flags = MORE[case]
    train(*BASE, *flags, f"--output_dir={tmp_path / '1'}", program=PROGRAM)
    for workers in sizes:
        train(*BASE, *flags, f"--output_dir={tmp_path / str(workers)}", kind=kind, workers=workers, program=PROGRAM,
              timeout=900)
        assert differences(tmp_path / "1", tmp_path / str(workers)) == []


@pytest.mark.trainings
@pytest.mark.parametrize("workers", [4, pytest.param(6, marks=pytest.mark.campaign)])
def test_a_span_over_workers_and_a_torus_make_the_same_bits(workers, tmp_path):
    """Batch norm over two workers needs an even number of them."""
    flags = *BASE, "--batch_size=96", "--batch_norm_span=16", "--epochs=1"
    train(*flags, f"--output_dir={tmp_path / '2'}", kind="mpirun", workers=2, program=PROGRAM)
    train(*flags, "--allreduce=torus", f"--output_dir={tmp_path / 'torus'}", kind="mpirun", workers=workers,
          program=PROGRAM)
    assert differences(tmp_path / "2", tmp_path / "torus") == []


@pytest.mark.trainings
def test_a_repeated_run_has_the_same_bits(tmp_path):
    """Each update and each measurement has operations that could run side by side: four groups of batch norm, and
    accumulation. oneDNN and Eigen would split their sums among the threads that happen to be free. With two
    operations at a time and without TensorFlow's determinism, all of four runs differed.
    """
    found = set()
    for number in range(2):
        train(DIGITS, "--epochs=1", "--batch_norm_statistics=exact", "--deterministic",
              f"--output_dir={tmp_path}/{number}")
        found.add(rows(tmp_path / str(number))[0]["weights"])
    assert len(found) == 1
