"""train.py as a user runs it: real processes, alone and under horovodrun and mpirun."""
import json
import re
import subprocess

import numpy as np
import pytest
from conftest import BIN, IN_PROC, ROOT, TINY, launcher, printed_json, require_tool, rows, run, train, weights

from common.flags import names
from common.run_folder import RunFolder
from plan.settings import Launch, Recipe, Run

ROW = {"epoch", "samples", "learning_rate", "momentum", "batch_size", "train_loss", "train_top1", "val_loss",
       "val_top1", "val_top5", "weights", "images_per_second", "seconds"}
SUMMARY = {"val_top1", "val_top5", "val_loss", "val_samples", "train_samples", "epochs", "global_batch_size",
           "world_size", "images_per_second", "seconds", "balanced_top1", "macro_f1"}
COUNTS = ("val_top1_count", "val_top5_count", "val_samples")
BY_CLASS = ("balanced_top1", "macro_f1", "balanced_samples", "weakest_classes")


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """The recipe that is read without flags, for three of its epochs, on one worker."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train("--epochs=3", f"--output_dir={folder}")


@pytest.mark.trainings
def test_the_digits_reach_97_percent(tmp_path):
    """No flags but the folder: the recipe in full."""
    done = train(f"--output_dir={tmp_path}")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert printed_json(done) == summary
    assert summary["val_top1"] >= 0.97 and summary["val_samples"] == 360
    assert summary.keys() >= SUMMARY and summary["advice"] == []
    assert [row["epoch"] for row in rows(tmp_path)] == list(range(1, 13))
    assert rows(tmp_path)[-1]["samples"] == 134 * 128
    assert rows(tmp_path)[5]["learning_rate"] == pytest.approx(8 * 0.25)  # epoch 6 of 12, power 2


def test_the_run_folder_holds_what_is_promised(digits_run):
    folder, done = digits_run
    names = {"plan.json", "flags.txt", "metrics.jsonl", "times.jsonl", "steps.jsonl", "summary.json", "run.json",
             "outcomes.json", "classes.csv", "predictions.csv", "samples.jpg", "checkpoints", "tensorboard",
             "report.html", ".lock"}
    assert {path.name for path in folder.iterdir()} == names
    assert [{*row} for row in rows(folder)] == [ROW] * 3
    assert [row["epoch"] for row in rows(folder)] == [1, 2, 3]
    assert rows(folder)[-1]["samples"] == 33 * 128
    plan = json.loads((folder / "plan.json").read_text())
    assert printed_json_of_plan(run("python", 1, ROOT / "train.py", "--dry_run", "--epochs=3")) == plan
    assert len([line for line in done.stderr.splitlines() if line.startswith("epoch ")]) == 3
    others = [line for line in done.stderr.splitlines() if not line.startswith("start-up: ")]
    assert "tensorflow" not in "".join(others).lower()  # its notices at start are kept off the screen


def printed_json_of_plan(done):
    return json.loads(done.stdout)


def test_tensorboard_shows_the_metrics(digits_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(digits_run[0] / "tensorboard"), {"tensors": 0})
    events.Reload()
    top1 = [float(np.frombuffer(event.tensor_proto.tensor_content or np.float32(event.tensor_proto.float_val[0]),
                                np.float32)[0]) for event in events.Tensors("top1/validation")]
    assert top1 == pytest.approx([row["val_top1"] for row in rows(digits_run[0])])


def test_the_flags_of_a_run_run_again(digits_run, tmp_path):
    done = run("python", 1, ROOT / "train.py", f"--flagfile={digits_run[0]}/flags.txt", "--dry_run", cwd=tmp_path)
    assert printed_json_of_plan(done) == json.loads((digits_run[0] / "plan.json").read_text())


def test_the_report_shows_in_a_browser_and_needs_nothing_else(digits_run, tmp_path):
    page = (digits_run[0] / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)  # nothing to fetch
    chromium = require_tool("chromium", "chromium-browser", "google-chrome")
    shown = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path}", "--dump-dom", f"file://{digits_run[0]}/report.html"],
        capture_output=True, text=True, timeout=300)
    for word in ("<svg", "Loss", "throughput", "validation top-1", "global batch size", "resnet20 was trained"):
        assert word in shown.stdout


@pytest.mark.parametrize("best", [pytest.param(False, marks=pytest.mark.trainings), True])
def test_evaluation_counts_the_same_on_three_workers(digits_run, tmp_path, best):
    """The best evaluation, by metrics.jsonl's row of its epoch and the files of outcomes, and the last one."""
    folder, _ = digits_run
    done = train("--mode=evaluate", f"--checkpoint={folder}/checkpoints{'/best' if best else ''}",
                 f"--output_dir={tmp_path}", kind="horovodrun", workers=3)
    ours, training = printed_json(done), json.loads((folder / "summary.json").read_text())
    epoch = training["best_epoch"] if best else 3
    row = rows(folder)[epoch - 1]
    assert row["epoch"] == ours["epochs"] == epoch
    assert [ours[name] for name in ("val_top1", "val_top5", "val_samples")] == [
        row["val_top1"], row["val_top5"], training["val_samples"]]
    assert ours["val_loss"] == pytest.approx(row["val_loss"], rel=1e-5)
    assert ours["world_size"] == 3
    assert json.loads((tmp_path / "summary.json").read_text()) == ours
    assert RunFolder(tmp_path).ending() == {} and RunFolder(folder).ending() == training  # which alone ends a training
    assert [ours[name] for name in BY_CLASS] == [training[f"best_{name}" if best else name] for name in BY_CLASS]
    if best:
        by_class = [(one / "classes.csv").read_text() for one in (folder, tmp_path)]
        assert by_class[0] == by_class[1] and len(by_class[0].splitlines()) == 11
    else:
        assert [ours[name] for name in COUNTS] == [training[name] for name in COUNTS]


@pytest.mark.parametrize(("kind", "workers"), [
    ("python", 1), ("mpirun", 2), pytest.param("mpirun", 3, marks=pytest.mark.trainings)])
def test_a_prime_number_of_validation_samples(digits_run, odd_digits, kind, workers):
    """353 samples divide by no number of workers; the reference is a whole evaluation in this process."""
    done = train("--mode=evaluate", f"--checkpoint={digits_run[0]}/checkpoints", f"--data_dir={odd_digits}", kind=kind,
                 workers=workers)
    ours = printed_json(done)
    assert [ours[name] for name in COUNTS] == reference_counts(digits_run[0], odd_digits)
    assert ours["train_samples"] == 1437


def reference_counts(folder, data_dir):
    """Top-1 and top-5 hits by NumPy, from logits on images decoded by Pillow's library and fed as one batch."""
    import model_zoo
    from data.augmentation import AUGMENTATIONS
    from data.dataset import open_dataset
    from data.feed import Feed

    dataset = open_dataset(data_dir)
    model = model_zoo.create_model("resnet20", 10, 32, mean=dataset.mean, std=dataset.std)
    kept = weights(folder)
    for number, variable in enumerate(model.variables):
        variable.assign(next(value for name, value in kept.items() if name.startswith(f"model/{number:03}/")))
    with Feed(dataset, 32, AUGMENTATIONS["none"], 0).validation(353) as (batches, samples):
        images, labels = next(batches)
    logits, labels = model.predict_on_batch(images), labels.numpy().ravel()
    ranking = np.argsort(-logits, axis=1)
    top1 = (ranking[:, 0] == labels).sum()
    return [top1, (ranking[:, :5] == labels[:, None]).any(axis=1).sum(), samples]


@pytest.mark.campaign  # the digits' 97 % and the same weights on one worker and two imply it
def test_two_workers_under_horovodrun_reach_96_percent(tmp_path):
    summary = printed_json(train(f"--output_dir={tmp_path}", kind="horovodrun", workers=2, cold=True))
    assert summary["val_top1"] >= 0.96 and summary["world_size"] == 2


@pytest.fixture(scope="module")
def without_batch_norm(tmp_path_factory):
    """A network without batch norm, batches of 1,024 in micro-batches of 128, on one worker and on two."""
    folders = {}
    for workers in (1, 2):
        folders[workers] = tmp_path_factory.mktemp(f"convnet-{workers}")
        train("--model=convnet", "--augmentation=none", "--batch_size=1024", "--micro_batch_size=128", "--epochs=6",
              "--log_trust_ratios", f"--output_dir={folders[workers]}", kind="python" if workers == 1 else "mpirun",
              workers=workers)
    return folders


@pytest.mark.trainings
def test_one_worker_and_two_make_the_same_weights(without_batch_norm):
    plans = {workers: json.loads((folder / "plan.json").read_text()) for workers, folder in without_batch_norm.items()}
    assert [plans[workers]["phases"][0]["accumulation_steps"] for workers in (1, 2)] == [8, 4]
    assert plans[1]["steps"] == plans[2]["steps"] == 8 and plans[1]["schedule"] == plans[2]["schedule"]
    one, two = weights(without_batch_norm[1]), weights(without_batch_norm[2])
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-3, atol=1e-5, err_msg=name)
    for a, b in zip(rows(without_batch_norm[1]), rows(without_batch_norm[2]), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)


@pytest.mark.trainings
def test_trust_ratios_are_recorded_and_reported(without_batch_norm):
    folder = without_batch_norm[2]
    recorded = [json.loads(line) for line in (folder / "trust_ratios.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in recorded] == [0, 1, 2, 3, 4, 6]  # the first step, then an epoch each
    for weight, gradient, ratio in recorded[0]["layers"].values():
        expected = 0.001 * weight / (gradient + 1e-4 * weight) if weight and gradient else 1
        assert ratio == pytest.approx(expected, rel=1e-3)
    assert len(recorded[0]["layers"]) == 10 and "Layer by layer" in (folder / "report.html").read_text()


# What is wrong, the exit code, and a part of the line on standard error. Alone, each is found before TensorFlow loads
# unless it takes TensorFlow to find it.
BAD_INPUT = [
    (["--data_dir=/nonexistent"], 1, "there is no folder /nonexistent"),
    (["--data_dir={empty}"], 1, "contains neither dataset.json"),
    (["--data_dir={wrong}"], 1, "should contain 1436 samples"),
    (["--model=resnet2000"], 2, "--model=resnet2000"),
    (["--modle=resnet20"], 2, "modle"),
    (["--batch_size=big"], 2, "--batch_size=big"),
    (["--epochs=-1"], 2, "--epochs=-1"),
    (["--batch_size=0:64,nan:128"], 2, "finite"),
    (["--seed=4294967296"], 2, "--seed"),
    (["--weight_decay=nan"], 2, "must be a finite number"),
    (["--epochs=inf"], 2, "--epochs=inf"),
    (["--lr_boundaries=60,30"], 2, "lr_boundaries"),
    (["--flagfile=/nonexistent.flags"], 2, "/nonexistent.flags"),
    (["digits"], 2, "'digits' is not a flag"),
    (["--workers=8"], 2, "--dry_run"),
    (["--mode=evaluate"], 2, "--checkpoint"),
    (["--mode=evaluate", "--checkpoint={empty}"], 1, "is not in a run folder"),
    (["--batch_size=100", "--micro_batch_size=64"], 1, "64 and 128"),
    (["--dali_device=gpu"], 1, "sees no GPU"),
    (["--output_dir=/proc/nowhere"], 1, IN_PROC),
    (["--output_dir={run}", "--epochs=3", "--optimizer=sgd"], 1, "optimizer was lars and is now sgd"),
    (["--checkpoint_every=0"], 2, "--checkpoint_every=0"),
    (["--elastic"], 2, "--host-discovery-script"),
    (["--exclude=nothing,void"], 1, "'nothing', 'void'"),
    (["--learning_rate=0.05"], 1, "--warmup=gradual would lower the learning rate from 0.5 to 0.05"),
    (["--mode=evaluate", "--checkpoint={run}/checkpoints", "--model=convnet"], 1, "does not fit this model"),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory, digits, digits_run):
    empty, wrong = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("wrong")
    for path in digits.iterdir():
        content = path.read_bytes()
        (wrong / path.name).write_bytes(content.replace(b"1437", b"1436") if path.suffix == ".json" else content)
    return {"empty": empty, "wrong": wrong, "run": digits_run[0]}


def complaint(done):
    """train.py's own lines on standard error, without a launcher's prefix."""
    return [line.split(">:")[-1] for line in done.stderr.splitlines() if "train.py: " in line]


@pytest.mark.parametrize(("flags", "code", "message"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line_and_an_exit_code(flags, code, message, paths, tmp_path):
    done = run("python", 1, ROOT / "train.py", *(flag.format(**paths) for flag in flags), cwd=tmp_path, timeout=300)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr and not done.stdout
    assert not list(tmp_path.iterdir())  # nothing half-written


@pytest.mark.parametrize(("kind", "flags", "code", "message"), [
    ("mpirun", ["--data_dir=/nonexistent"], 1, "there is no folder"),
    ("mpirun", ["--model=resnet2000"], 2, "--model=resnet2000"),
    ("mpirun", ["--batch_size=127"], 1, "126 and 128"),
    ("mpirun", ["--dali_device=gpu"], 1, "sees no GPU"),
    ("mpirun", ["--output_dir=/proc/nowhere"], 1, IN_PROC),  # only rank 0 sees it
    ("horovodrun", ["--output_dir=/proc/nowhere"], 1, IN_PROC),
])
def test_bad_input_ends_every_worker(kind, flags, code, message):
    done = run(kind, 2, ROOT / "train.py", *flags, timeout=300)
    assert done.returncode == code
    assert complaint(done) and all(message in line for line in complaint(done))
    assert 'File "' not in done.stdout and done.stderr.count("Traceback") == (kind == "horovodrun")  # its own


def test_workers_with_different_flags_all_stop():
    python = launcher("python", 1)[0]
    command = [*launcher("mpirun", 1), ROOT / "train.py", "--seed=1", ":", "-np", "1", python, ROOT / "train.py",
               "--seed=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1
    assert complaint(done) == ["train.py: the workers were started with different flags: --seed is 1 on rank 0 and 2 "
                               "on rank 1"] * 2


def test_a_dry_run_beside_a_training_does_not_hang():
    python = launcher("python", 1)[0]
    command = [*launcher("mpirun", 1), ROOT / "train.py", "--dry_run", ":", "-np", "1", python, ROOT / "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1 and all("--dry_run is True on rank 0" in line for line in complaint(done))


def test_what_is_given_wins_over_a_recipe_wherever_it_stands(digits_run):
    for flags in (["--epochs=3", f"--flagfile={digits_run[0]}/flags.txt"],
                  ["--flagfile", f"{digits_run[0]}/flags.txt", "--epochs=3"]):
        done = run("python", 1, ROOT / "train.py", "--dry_run", *flags)
        assert printed_json_of_plan(done)["epochs"] == 3


def test_standard_output_carries_json_alone_whatever_a_library_prints():
    """From C, and from Python, as a module of the user's own may."""
    program = ("import os; from common.command import json_only_on_stdout, output\n"
               "with json_only_on_stdout(): os.write(1, b'noise\\n'); print('more'); output('{}')\n"
               "print('after')")
    done = run("python", 1, "-c", program)
    assert (done.stdout, done.stderr) == ("{}\nafter\n", "noise\nmore\n")


def test_help_answers_at_once_with_every_default():
    done = run("python", 1, "-X", "importtime", ROOT / "train.py", "--help", cold=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "absl" in imported
    assert not imported & {"tensorflow", "horovod", "nvidia", "mpi4py", "matplotlib", "PIL"}  # 0.3 s; 8 s with them
    for word in ("--batch_size", "--output_dir", "default: 128", "(lars | sgd | lamb | muon | adam | adamw)",
                 "--helpfull"):
        assert word in done.stdout
    assert len(done.stdout.splitlines()) <= 50 and "--lr_scaling" not in done.stdout  # a screen
    done = run("python", 1, ROOT / "train.py", "--helpfull")
    for word in ("--lr_scaling", "Recipe flags", "default: 0.001", "(lars | sgd | lamb | muon | adam | adamw)"):
        assert word in done.stdout
    shown = {word.rstrip(":") for line in done.stdout.splitlines() for word in line.split()[:1]}
    assert {f"--{name}" for group in (Recipe, Launch, Run) for name in names(group)} <= shown


def test_help_may_be_cut_off():
    done = subprocess.run(f"'{BIN}/python' '{ROOT}/train.py' --helpfull | head -n 1", shell=True, text=True,
                          capture_output=True, timeout=300)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


@pytest.mark.parametrize(("given", "meant"), [
    ("--optimizer=larss", "lars"), ("--model=resnet5", "resnet50"), ("--precision=float16", "mixed_float16"),
    ("--learningrate=3", "learning_rate"), ("--batchsize=3", "batch_size")])
def test_a_wrong_flag_or_value_names_the_nearest(given, meant):
    done = run("python", 1, ROOT / "train.py", given)
    assert done.returncode == 2 and "did you mean" in done.stderr.lower(), done.stderr
    assert meant in done.stderr.lower().rpartition("did you mean")[2]


def test_what_else_a_wrong_value_may_have_meant():
    """MODULE:NAME is a value, too, and a switch with a value has no blank before it."""
    for given, told in (
            (("--augmentation=foo",), "flag --augmentation=foo: value should be one of <none|crop"),
            (("--augmentation=foo",), "or your own as MODULE:NAME"),
            (("--mode=export", "--checkpoint=X", "--tflite", "dynamic_range"), "give --tflite=dynamic_range"),
            (("--tflite", "dynamic"), "'dynamic' is not a flag; --help lists all flags")):
        done = run("python", 1, ROOT / "train.py", *given)
        assert done.returncode == 2 and told in done.stderr, done.stderr


@pytest.mark.parametrize(("flags", "recipe", "epochs"), [
    ([], "digits", 12), (["--data_dir=digits", "--optimizer=sgd"], "digits", 12),
    (["--data_dir", "/nonexistent", "--train_samples=50000", "--optimizer=sgd", "--learning_rate=0.05"], "images", 90)])
def test_the_digits_recipe_holds_for_the_digits_alone(flags, recipe, epochs):
    """Their warm-up from 0.5 made other data diverge."""
    done = run("python", 1, ROOT / "train.py", "--dry_run", *flags)
    assert done.returncode == 0 and done.stderr.splitlines()[0] == f"recipe: {ROOT}/recipes/{recipe}.flags"
    made = json.loads(done.stdout)
    assert made["epochs"] == epochs and (made["schedule"][0]["learning_rate"] == 0) == (recipe == "images")


def test_a_plan_for_workers_and_data_that_are_not_there():
    done = run("python", 1, ROOT / "train.py", "--dry_run", "--workers=256", "--train_samples=1281167",
               "--batch_size=32768", "--data_dir=/nonexistent", "--epochs=90")
    plan = json.loads(done.stdout)
    assert plan["workers"] == 256 and plan["steps"] == 90 * 1281167 // 32768
    assert plan["phases"] == [{"start_epoch": 0, "end_epoch": 90, "global_batch_size": 32768, "micro_batch_size": 64,
                               "accumulation_steps": 2, "steps": 3518, "batch_norm_span": 32, "image_size": 224,
                               "workers": 256}]


def test_only_training_needs_an_elastic_launcher(tmp_path):
    """The flags of an elastic run also serve for what reads its checkpoints, and for its plan."""
    from plan.flags import parse

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "flags.txt").write_text("--elastic\n--batch_size=256\n--data_dir=digits\n")
    for mode, *more in (["evaluate"], ["export", "--output_dir=/tmp"], ["predict", "--image=a.jpg"]):
        settings = parse(["train.py", f"--mode={mode}", f"--checkpoint={tmp_path}/checkpoints", *more])
        assert settings.launch.elastic and settings.run.mode == mode
    plan = run("python", 1, ROOT / "train.py", "--dry_run", f"--flagfile={tmp_path}/flags.txt")
    assert plan.returncode == 0 and json.loads(plan.stdout)["phases"][0]["global_batch_size"] == 256
    done = run("python", 1, ROOT / "train.py", f"--flagfile={tmp_path}/flags.txt")
    assert done.returncode == 2 and done.stderr.startswith("train.py: --elastic needs horovodrun --min-np=N")


def test_a_plan_under_a_launcher_is_for_its_workers():
    done = run("mpirun", 2, ROOT / "train.py", "--dry_run")
    assert printed_json_of_plan(done)["workers"] == 2


@pytest.mark.trainings
def test_a_start_without_bytecode_says_how_to_save_its_seconds(tmp_path, monkeypatch):
    """In a folder of its own, so that the environment's is neither seen nor written. The second start writes it."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "cache"))
    for variable, said in (("1", True), ("", False)):
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", variable)
        done = train(*TINY, "--epochs=0.1", "--data_dir=synthetic:64", "--batch_size=8", "--batch_norm_span=8",
                     f"--output_dir={tmp_path}/{variable}", cold=True)
        assert ("`uv sync --compile-bytecode` does that once" in done.stderr) == said


@pytest.mark.trainings
def test_a_target_ends_training_and_the_summary_says_when(tmp_path):
    """On two workers, which end together; the same command again has nothing left to do."""
    flags = ("--model=convnet", "--warmup=none", "--epochs=12", "--optimizer=sgd", "--learning_rate=0.05",
             "--evaluate_every=2", "--target_top1=0.6", "--stop_at_target", f"--output_dir={tmp_path}")
    summary = printed_json(train(*flags, kind="mpirun", workers=2))
    found = rows(tmp_path)
    assert found[-1]["val_top1"] >= 0.6 and all(row["val_top1"] < 0.6 for row in found[:-1])
    assert [row["epoch"] for row in found] == list(range(2, found[-1]["epoch"] + 1, 2)) and found[-1]["epoch"] < 12
    assert (summary["epochs"], summary["epochs_to_target"]) == (found[-1]["epoch"],) * 2
    assert summary["seconds_to_target"] == found[-1]["seconds"] <= summary["seconds"]
    assert (summary["best_top1"], summary["best_epoch"]) == (found[-1]["val_top1"], found[-1]["epoch"])
    again = printed_json(train(*flags, kind="mpirun", workers=2))
    assert again["val_top1"] == summary["val_top1"] and rows(tmp_path) == found
    (tmp_path / "own.flags").write_text("--data_dir=digits\n" + "\n".join(flags[:5]))
    done = train(f"--flagfile={tmp_path}/own.flags", "--epochs=1", "--target_top1=1", f"--output_dir={tmp_path}/missed")
    missed = printed_json(done)
    assert missed["epochs_to_target"] is None and missed["seconds_to_target"] is None and missed["epochs"] == 1
    [sentence] = missed["advice"]
    assert summary["advice"] == [] and f"advice: {sentence}\n" in done.stderr
    assert sentence == "The recipe has more epochs than 1; give --epochs=12."
    assert sentence in re.sub("<[^>]*>", "", (tmp_path / "missed" / "report.html").read_text())
