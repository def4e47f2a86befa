"""States that differ between workers: a flipped bit is found, is never saved, and the message names whom and what."""
import json

import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, TINY, run, train, weights

from experiments.verify import TIMES
from training import weight_check

SHAPES = ((3, 3, 3, 16), (64, 10), (10,), (1,))
# Flips a bit of a state's first value after a step, on one rank. Arguments: RANK:STEP:KIND,…; then the flags. Of
# several with one step, each comes when the step is made again.
FLIPPING = """
import sys, time
import numpy as np
from model_zoo import MODELS
from tests.rigs import bn_train
MODELS[bn_train.NAME] = bn_train.INFO
import train
from training.recovery import Recovery
flips = [flip.split(":") for flip in sys.argv[1].split(",")]
is_due_after = Recovery.is_due_after

def variable(state, kind):
    return {"weight": lambda: state.model.trainable_variables[1], "moving": lambda: state.moving._vector,
            "average": lambda: state.average.variables[0], "totals": lambda: state.totals.variable,
            "norms": lambda: state.layers.variable,
            "momentum": lambda: next(one for name, one in state.variables.items() if "/momentum/" in name),
            "loss scale": lambda: state.optimizer._loss_scale.current_loss_scale,
            "updates": lambda: state.variables["optimizer/000/iteration"]}[kind]()

def flipped(self, signals):
    for flip in [flip for flip in flips if int(flip[1]) == self._setup.state.progress.step][:1]:
        flips.remove(flip)
        while self._checkpoints and self._checkpoints.is_writing:  # then the next one is saved as soon as it is due
            time.sleep(0.001)
        if self._setup.world.rank == int(flip[0]):
            one = variable(self._setup.state, flip[2])
            values = np.array(one.numpy())
            values.reshape(-1).view(np.uint8)[values.itemsize // 2] ^= 64
            if flip[3:]:  # instead, on this only worker
                values[-1] = float(flip[3])
            one.assign(values)
    return is_due_after(self, signals)

Recovery.is_due_after = flipped
sys.exit(train.main(["train.py", *sys.argv[2:]]))
"""
FAULTS = (  # rank, the step after which it comes, kind of state, the variable that the message names first
    (0, 3, "weight", "model/001"), (1, 7, "moving", "model/003"), (2, 14, "momentum", "optimizer/001"),
    (0, 16, "average", "ema/000"), (1, 23, "loss scale", "optimizer/013"), (2, 28, "updates", "optimizer/000"),
    (0, 30, "totals", "totals"), (1, 37, "norms", "layer_norms"))  # a checkpoint follows steps 14, 23, 28 and 37
ALL_KINDS = (DIGITS, "--model=bn_convnet", "--image_size=8", "--augmentation=none", "--batch_size=63", "--epochs=2",
             "--batch_norm_span=auto", "--precision=mixed_float16", "--ema_decay=0.9", "--log_trust_ratios",
             "--deterministic")
VARIED = (  # a training without a fault has one of each
    (["--optimizer=lars"], ["--optimizer=sgd", "--learning_rate=0.01"],
     *([f"--optimizer={name}", "--learning_rate=0.002"] for name in ("lamb", "adamw"))),
    (["--precision=float32"], ["--precision=mixed_bfloat16"]),
    (["--compression=none"], ["--compression=fp16"], ["--allreduce=torus"], ["--deterministic"]),
    (["--micro_batch_size=18"], ["--micro_batch_size=6"]),
    (["--ema_decay=0"], ["--ema_decay=0.9"]),
)
SMALL = (DIGITS, "--model=convnet", "--epochs=4", "--batch_size=64", "--batch_norm_span=auto", "--augmentation=none")


def kept(folder) -> list[dict]:
    """The rows of a run's metrics, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def values_of(random) -> list[np.ndarray]:
    """Values of each dtype that a state has."""
    return [*(random.normal(size=shape).astype(np.float32) for shape in SHAPES), random.normal(size=7),
            random.normal(size=(5, 2)).astype(np.float16), np.array(random.integers(2**40)), np.zeros(0, np.float32)]


def expected(values) -> int:
    """The checksum by its definition."""
    bits = np.concatenate([one.reshape(-1).view(f"i{one.itemsize}").astype(np.int64) for one in values])
    return int(np.sum(bits.view(np.uint64) * np.arange(1, 2 * len(bits), 2, dtype=np.uint64)))


def found(values) -> int:
    return int(weight_check.checksum([*map(tf.constant, values)])) % 2**64


@pytest.mark.parametrize("piece", [2**20, 64, 10, 1])
def test_the_checksum_is_that_of_numpy(piece, monkeypatch):
    """In pieces of any size."""
    monkeypatch.setattr(weight_check, "SLICE", piece)
    weight_check._odd_numbers.cache_clear()
    values = values_of(np.random.default_rng(0))
    made = int(weight_check.checksum([*map(tf.constant, values)]))
    assert made % 2**64 == expected(values) and weight_check.in_hexadecimal(made) == f"{expected(values):016x}"
    weight_check._odd_numbers.cache_clear()


def test_each_of_200_flipped_bits_is_found():
    random = np.random.default_rng(1)
    values = values_of(random)
    before = found(values)
    for _ in range(200):
        others = [one.copy() for one in values]
        one = others[random.integers(len(others) - 1)]
        bits = one.reshape(-1).view(np.uint8)
        bits[random.integers(len(bits))] ^= np.uint8(1 << int(random.integers(8)))
        assert found(others) != before


def test_values_that_change_places_are_found():
    """The sum of all bits is the same."""
    one, other = np.float32([1.0, 2.0]), np.float32([3.0, 4.0])
    assert len({found([one, other]), found([other, one]), found([one[::-1], other])}) == 3


@pytest.mark.parametrize("kind", ["mpirun", "horovodrun"])
def test_the_numbers_of_three_workers_are_compared(kind):
    """Also those at the ends of the range, and whoever has the other one."""
    program = (
        "from distributed import world as worlds\n"
        "world = worlds.start(0)\n"
        "ends = [-2**63, 2**63 - 1, 0, -1]\n"
        "equal = world.is_equal(ends, 'equal')\n"
        "others = [world.is_equal([5, -2**63 + (world.rank == rank)], f'other_{rank}') for rank in range(3)]\n"
        "print('found:', equal, *others, flush=True)\n"
        "world.barrier()")
    done = run(kind, 3, "-c", program)
    assert done.stdout.count("found: True False False False") == 3, done.stderr


@pytest.mark.trainings
def test_no_state_that_differs_is_saved_and_a_rollback_undoes_it(tmp_path):
    """After a fault in each kind of state, on one rank after another, the bits are those of one worker without any."""
    faulty, sound = tmp_path / "faulty", tmp_path / "sound"
    flags = (*ALL_KINDS, "--micro_batch_size=21", "--on_divergence=rollback", "--max_rollbacks=20",
             "--checkpoint_every=0.2")
    flips = ",".join(f"{rank}:{step}:{kind}" for rank, step, kind, _ in FAULTS)
    done = run("mpirun", 3, "-c", FLIPPING, flips, *flags, f"--output_dir={faulty}")
    said = [line for line in done.stderr.splitlines() if "rolled back to" in line]
    assert done.returncode == 0 and len(said) == len(FAULTS), done.stderr
    for line, (rank, step, _, named) in zip(said, FAULTS, strict=True):
        assert f"the weights of rank {rank} on " in line and " differ from those of 2 workers: " in line
        assert int(line.partition("/step-")[2][:8]) <= step, line
        assert named in line and line.endswith("training continues with the same samples"), line
    run("python", 1, "-c", FLIPPING, "0:999:weight", *flags, f"--output_dir={sound}")
    assert kept(faulty) == kept(sound) and len(kept(sound)) == 2


@pytest.mark.trainings
def test_a_tie_blames_nobody_and_the_same_command_goes_on(tmp_path):
    """Rank 0 has the fault, and of two workers nobody knows that. The checkpoint that it would spoil is not written."""
    folder = tmp_path / "faulty"
    flags = (DIGITS, *TINY, "--batch_size=64", "--micro_batch_size=32", "--epochs=2", "--checkpoint_every=0.5",
             "--deterministic")
    words = *flags, f"--output_dir={folder}"
    done = run("mpirun", 2, "-c", FLIPPING, "0:13:weight", *words)
    lines = [line for line in done.stderr.splitlines() if "train.py: " in line]
    assert done.returncode == 1 and len(lines) == 3, done.stderr  # of rank 0 alone
    assert lines[0].count("rank 0 on ") == lines[0].count("rank 1 on ") == 1, lines[0]
    assert "differ from each other: model/001" in lines[0]
    assert "the last good checkpoint: " in lines[1] and "step-00000012" in lines[1] and "test the memory" in lines[2]
    assert json.loads((folder / "summary.json").read_text())["diverged"] is True
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000012"]
    train(*words, kind="mpirun", workers=2)
    train(*flags, f"--output_dir={tmp_path}/sound")  # alone
    assert kept(folder) == kept(tmp_path / "sound")


@pytest.mark.trainings
def test_a_stop_saves_nothing_that_differs(tmp_path):
    """The stop's checkpoint, at step 9, would be the first."""
    program = FLIPPING.replace("    return is_due", "    if self._setup.state.progress.step == 9:\n"
                               "        import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n    return is_due")
    done = run("mpirun", 2, "-c", program, "1:6:momentum", *SMALL, f"--output_dir={tmp_path}/run")
    assert done.returncode == 1 and "the last good checkpoint: none" in done.stderr, done.stderr
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


def test_a_training_does_not_begin_with_states_that_differ(tmp_path):
    program = FLIPPING.replace("is_due_after = Recovery.is_due_after", "begin = Recovery.begin").replace(
        "is_due_after(self, signals)", "begin(self)").replace("Recovery.is_due_after = flipped",
                                                              "Recovery.begin = lambda self: flipped(self, ())")
    done = run("mpirun", 2, "-c", program, "0:0:weight", *SMALL, "--on_divergence=rollback",
               f"--output_dir={tmp_path}/run")
    assert done.returncode == 1 and done.stderr.count("after step 0 (epoch 0.000), the weights of rank 0") == 2
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


@pytest.mark.trainings
def test_no_state_that_is_not_finite_is_saved(tmp_path):
    """Each change comes after step 14, which a checkpoint follows. The loss of the next step may still be finite."""
    named = {"0:14:moving:inf": "moving_variance", "0:14:average:nan": "ema/000", "0:14:weight:-inf": "model/001"}
    done = run("python", 1, "-c", FLIPPING, ",".join(named), *ALL_KINDS, "--on_divergence=rollback",
               "--checkpoint_every=0.2", "--epochs=1", f"--output_dir={tmp_path}")
    lines = [line for line in done.stderr.splitlines() if "rolled back to" in line]
    assert done.returncode == 0, done.stderr
    for number, (said, name) in enumerate(zip(lines, named.values(), strict=True), 1):
        assert "training diverged at step 13 (epoch 0.6" in said and name in said, said
        assert " is infinite or NaN; rolled back to " in said and f"({number} of 3)" in said, said
        assert int(said.partition("/step-")[2][:8]) in (5, 10)  # a slow disk leaves one out
    saved = [values for name, values in weights(tmp_path).items() if name.startswith(("model", "ema", "totals"))]
    assert len(saved) > 30 and all(np.isfinite(values).all() for values in saved)


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=pytest.mark.campaign if seed else pytest.mark.trainings) for seed in range(50)])
def test_trainings_without_a_fault_are_silent(seed, tmp_path):
    """Whatever their settings are."""
    random = np.random.default_rng(seed)
    chosen = [flag for flags in VARIED for flag in flags[random.integers(len(flags))]]
    workers = int(random.choice([2, 4]))
    done = train(*SMALL, "--epochs=2", "--batch_size=72", "--warmup=none", *chosen, f"--output_dir={tmp_path}",
                 kind="mpirun", workers=workers)
    assert weight_check.DIFFER not in done.stderr
