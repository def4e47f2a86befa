"""Which recipe is read without --flagfile, and what fits it to the data."""
import json
import socketserver
import subprocess
import threading

import pytest
from conftest import IN_PROC, ROOT, run
from PIL import Image

from common import VERSION
from common.command import USERS_KERAS_HOME
from common.errors import UserError
from model_zoo.weights import can_be_had, check_weights
from plan import flags
from plan.recipes import fitted, recipe_path


def parsed(*words):
    return flags.parse(["train.py", *words])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """8 images in each of two classes, and 4 to validate."""
    folder = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 8), ("val", 4)):
        for label, colour in (("cat", (200, 40, 40)), ("dog", (40, 40, 200))):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (80, 60), tuple(value + number for value in colour)).save(
                    folder / split / label / f"{number}.jpg")
    return folder


@pytest.mark.parametrize(("samples", "recipe", "batch", "epochs"), [
    (3, "small_images", 1, 40), (30, "small_images", 2, 40), (99, "small_images", 8, 40),
    (300, "small_images", 32, 80), (1_000, "small_images", 32, 40), (2_000, "small_images", 32, 20),
    (49_999, "small_images", 32, 16), (50_000, "images", 256, 90), (1_281_167, "images", 256, 90)])
def test_the_recipe_fits_the_number_of_images(samples, recipe, batch, epochs, photos):
    found = parsed(f"--data_dir={photos}", f"--train_samples={samples}", "--dry_run")
    assert found.source.file.stem == recipe
    assert found.recipe.batch_size.values == [batch] and found.recipe.epochs == epochs
    assert found.recipe.batch_norm_span.values == [{"small_images": batch, "images": 32}[recipe]]
    assert batch <= max(1, samples / 8) and found.recipe.warmup_epochs <= epochs / 10
    assert f"--batch_size={batch}" in found.text.splitlines()  # flags.txt repeats the run


def test_flags_on_the_command_line_override_what_fits(photos):
    found = parsed(f"--data_dir={photos}", "--batch_size=4", "--epochs=3")
    assert (found.recipe.batch_size.values, found.recipe.epochs, found.recipe.model) == ([4], 3.0, "resnet10_narrow")
    assert found.source.fitted == ("--batch_norm_span=2", "--evaluate_every=1")  # what the line about the recipe shows
    own_size = parsed(f"--data_dir={photos}", "--model=keras:MobileNetV3Small")
    assert own_size.recipe.final_image_size == 224
    assert parsed(f"--data_dir={photos}", "--model=nets:own").recipe.final_image_size == 64  # which has no size
    tuned = parsed(f"--data_dir={photos}", "--model=keras:MobileNetV3Small", "--pretrained", "--image_size=96")
    assert tuned.recipe.final_image_size == 96 and not any("image_size" in flag for flag in tuned.source.fitted)
    assert tuned.recipe.learning_rate.values[0] < 0.001 and (own_size.recipe.epochs, tuned.recipe.epochs) == (40, 20)
    frozen = parsed(f"--data_dir={photos}", "--model=keras:MobileNetV3Small", "--pretrained", "--freeze")
    assert frozen.recipe.learning_rate == own_size.recipe.learning_rate and frozen.recipe.epochs == 20


@pytest.mark.parametrize(("words", "span"), [
    ([], 16), (["--batch_size=64"], 16), (["--batch_size=0:64,2:256"], 16), (["--micro_batch_size=32"], 16),
    (["--batch_size=100"], None), (["--batch_size=0:64,2:250"], None), (["--micro_batch_size=4"], None),
    (["--batch_size=100", "--batch_norm_span=10"], 10)])
def test_the_span_of_a_default_recipe_gives_way_to_a_batch_that_it_does_not_divide(words, span):
    from plan.plan import plan_for

    settings = parsed(*words)
    made = plan_for(settings, 1, 1, 1437)
    phases = {phase.batch_norm_span for phase in made.phases}
    assert phases == {span} if span else phases == {phase.micro_batch_size for phase in made.phases}
    assert ("--batch_norm_span=auto" in settings.source.fitted) == (span is None)  # train.py prints these flags
    again = parsed(*settings.source.words, *words)  # as a sweep starts it
    assert again.recipe == settings.recipe


def test_the_span_of_a_recipe_that_was_asked_for_does_not_give_way():
    from plan.plan import plan_for

    with pytest.raises(UserError, match="--batch_norm_span: 16 samples cannot"):
        plan_for(parsed("--flagfile=digits", "--batch_size=100"), 1, 1, 1437)


@pytest.mark.parametrize("name", ["digits", "fashion", "cifar10"])
def test_a_built_in_set_is_trained_as_the_digits_are(name):
    assert parsed(f"--data_dir={name}").source.file.stem == "digits" and parsed().source.file.stem == "digits"


@pytest.mark.trainings
def test_the_defaults_train_and_a_resume_reads_them_back(photos, tmp_path):
    """The run stops at its first evaluation. Then the set grows, and the recipe would be another."""
    command = "python", 1, ROOT / "train.py", f"--data_dir={photos}", f"--output_dir={tmp_path}/run"
    first = run(*command, "--stop_at_target", "--target_top1=0.01", cold=True)
    assert first.returncode == 0, first.stderr
    lines = first.stderr.splitlines()
    assert (f"recipe: {ROOT}/recipes/small_images.flags --batch_size=2 --batch_norm_span=2 --epochs=40 "
            "--evaluate_every=6") in lines
    assert any(line.startswith("forecast: about ") and line.endswith("CPU cores") for line in lines)
    assert max(map(len, (line for line in lines if line.startswith("epoch ")))) <= 80
    settings = parsed(*command[3:])
    assert settings.source.file == tmp_path / "run" / "flags.txt"
    assert settings.recipe == parsed(f"--data_dir={photos}").recipe

    new = run("python", 1, ROOT / "train.py", "--flagfile=digits", f"--init_checkpoint={tmp_path}/run/checkpoints",
              "--model=resnet10_narrow", "--dry_run")
    assert json.loads(new.stdout)["epochs"] == 12
    for data in ((), (f"--data_dir={photos}",)):
        tuned = parsed(*data, f"--init_checkpoint={tmp_path}/run/checkpoints")
        assert tuned.recipe.model == "resnet10_narrow" and tuned.recipe.final_image_size == 64


def test_a_batch_is_at_most_an_eighth():
    for samples in range(1, 10_000):
        batch = int(fitted(samples)[0].partition("=")[2])
        assert batch == 1 or 8 * batch <= samples


def test_a_recipe_has_a_name():
    assert recipe_path("digits") == recipe_path("digits.flags") == ROOT / "recipes" / "digits.flags"
    assert recipe_path("sysml18/" + next((ROOT / "recipes/sysml18").glob("*.flags")).stem).is_file()


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--flagfile=digts"], 2, "there is no recipe digts; did you mean digits?"),
    (["--flagfile", "table3-experimen4"], 2, "did you mean sony_1811.05233/table3-experiment4?"),
    (["--target_top1=95"], 2, "did you mean 0.95?"),
    (["--data_dir="], 2, "--data_dir=: the path is empty"),
    (["--output_dir=s3://bucket/run"], 2, "--output_dir=s3://bucket/run: nothing can be written to an address"),
    (["--lr=0.1"], 2, "did you mean --learning_rate?"),
    (["--gpus=8"], 2, "start one worker per GPU"),
    (["--device=cuda"], 2, "did you mean gpu?"),
    (["--model=keras:MobileNetV3Smal"], 2, "or your own as MODULE:NAME; did you mean keras:MobileNetV3Small?"),
    (["--pretrained"], 2, "--pretrained and --pretrained_weights need a network of Keras"),
    (["--model=keras:VGG16", "--pretrained", "--pretrained_weights=w.h5"], 2, "remove one of them"),
    (["--model=keras:VGG16", "--init_checkpoint=x", "--pretrained_weights=w.h5"], 2, "remove one of them"),
    (["--lr_schedule=multistep"], 2, "--lr_schedule=multistep needs --lr_boundaries"),
    (["--ema_decay=1"], 2, "--ema_decay=1"),
    (["--precision=float16"], 2, "did you mean mixed_float16?"),
    (["--precision=bf16"], 2, "did you mean mixed_bfloat16?"),
    (["--warmup-epochs=1"], 2, "did you mean --warmup_epochs?"),
    (["--batch=8"], 2, "did you mean --batch_size?"),
    (["--warmup_epochs=50", "--dry_run"], 2, "--warmup_epochs is longer than --epochs"),
    (["--data_dir=synthetic:many"], 2, "synthetic data needs the number of training samples"),
    (["--batch_size=0:64,30:128", "--dry_run"], 2, "has a phase that starts at or after --epochs=12; raise"),
    (["--flagfile=sony_1811.05233/table3-experiment2", "--epochs=18", "--dry_run"], 2, "--epochs=18; raise --epochs, "
     "or keep the recipe's shares with --warmup_epochs=1 --learning_rate=0:29.0,6:50.0 --batch_norm_span=0:16,6:32\n"),
    (["--image_size=0:16,7:24", "--epochs=6"], 2, "--image_size=0:16,7:24 has a phase that starts at or after"),
    (["--checkpoint_every=10s"], 2, "neither auto, a number of epochs, such as 0.5, nor of minutes, such as 10m"),
    (["--target_top1=75%"], 2, "75% is not a fraction from 0 to 1, such as 0.759"),
    (["--model=alexnet", "--image_size=32", "--dry_run"], 2, "alexnet needs images of at least"),
    (["--mode=evaluate", "--checkpoint={folder}"], 1, "{folder}/flags.txt does not exist"),
    (["--order=file", "--shuffle_group=16"], 2, "--shuffle_group shuffles samples, and --order=file"),
    (["--order=file", "--repeats=3"], 2, "--repeats takes images several times in an epoch, and --order=file each"),
    (["--output_dir=/proc/nowhere"], 1, IN_PROC)])
def test_what_cannot_be_meant(words, code, message, tmp_path):
    done = run("python", 1, ROOT / "train.py", *(word.format(folder=tmp_path) for word in words))
    assert done.returncode == code and len(done.stderr.splitlines()) == 1, done.stderr
    assert message.format(folder=tmp_path) in done.stderr


def test_a_flag_that_resembles_none_gets_no_suggestion():
    done = run("python", 1, ROOT / "train.py", "--bogus")
    assert (done.returncode, done.stderr) == (2, "train.py: Unknown command line flag 'bogus'\n")


def test_the_version():
    done = run("python", 1, ROOT / "train.py", "--version")
    head = ""
    if (ROOT / ".git").exists():  # git may refuse the checkout of another user
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True).stdout.strip()
    version, _, revision = done.stdout.partition(" (git ")
    assert done.returncode == 0 and version.rstrip() == f"bigbatch {VERSION}" and revision[:40] == head


@pytest.mark.parametrize(("words", "found"), [
    (["--warmup=none", "--warmup_epochs=0"], {"warmup_epochs": "warmup=none"}),
    (["--lr_boundaries=3,6", "--lars_epsilon=1"], {"lr_boundaries": "lr_schedule=poly"}),
    (["--optimizer=lamb", "--momentum_schedule=noise_scale", "--exclude=bias"],
     {"momentum_schedule": "optimizer=lamb"}),
    (["--lr_schedule=multistep", "--lr_boundaries=1", "--decay_from=warmup_end"],
     {"decay_from": "lr_schedule=multistep"}),
    (["--optimizer=adam", "--weight_decay=1", "--epochs=3"], {"weight_decay": "optimizer=adam"}),
    (["--model=convnet", "--last_gamma=0", "--loss_scale=8", "--torus_grid=2x1", "--max_rollbacks=5"], {
        "last_gamma": "model=convnet", "loss_scale": "precision=float32", "torus_grid": "allreduce=ring",
        "max_rollbacks": "on_divergence=stop"}),
    (["--optimizer=muon", "--momentum=0.95", "--momentum_correction", "--nesterov"],
     {"momentum_correction": "optimizer=muon", "nesterov": "optimizer=muon"}),
    (["--lars_clip", "--base_batch_size=64"], {"base_batch_size": "lr_scaling=none"}),
    (["--optimizer=sgd", "--lr_scaling=sqrt", "--base_batch_size=64", "--poly_power=1", "--warmup_epochs=1"], {}),
    (["--mode=evaluate", "--checkpoint=X", "--target_top1=0.9", "--observer=a:b", "--resume=never",
      "--flagfile=digits"],
     {"resume": "mode=evaluate", "target_top1": "mode=evaluate", "observer": "mode=evaluate"}),
    (["--mode=evaluate", "--checkpoint=X", "--device=cpu", "--micro_batch_size=8", "--flagfile=digits"], {}),
    (["--checkpoint=X"], {"checkpoint": "mode=train"}),
    (["--freeze", "--drop_path=0.1", "--batch_norm_span=32", "--batch_norm_momentum=0.9",
      "--batch_norm_statistics=moving", "--weight_decay=1e-4"], {
         "drop_path": "freeze", "batch_norm_span": "freeze", "batch_norm_momentum": "freeze",
         "batch_norm_statistics": "freeze"}),
    (["--nofreeze", "--drop_path=0.1", "--batch_norm_span=32"], {})])
def test_what_has_no_effect_beside_the_others(words, found):
    assert parsed(*words).without_effect == tuple(f"--{name} has no effect with --{why}" for name, why in found.items())


def test_a_number_of_samples_is_only_planned_for():
    assert parsed("--train_samples=100").without_effect == ("--train_samples has no effect without --dry_run",)
    assert parsed("--train_samples=100", "--dry_run").without_effect == ()


def test_a_checkpoint_that_is_not_there_is_an_error_where_it_has_no_effect(tmp_path):
    done = run("python", 1, ROOT / "train.py", "--checkpoint=/nonexistent", f"--output_dir={tmp_path}/run")
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "train.py: --checkpoint has no effect with --mode=train",
        "train.py: --checkpoint: /nonexistent does not exist; training starts from the weights of another run with "
        "--init_checkpoint, and resumes a run with its --output_dir"]
    assert not (tmp_path / "run").exists()


def test_one_line_says_what_has_no_effect():
    done = run("python", 1, ROOT / "train.py", "--optimizer=adam", "--warmup=none", "--weight_decay=1", "--nesterov",
               "--dry_run", "--workers=2")
    assert done.returncode == 0 and json.loads(done.stdout)["workers"] == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("train.py: ")] == [
        "train.py: --nesterov has no effect with --optimizer=adam; --weight_decay has no effect with --optimizer=adam"]


def test_without_a_network_pretrained_weights_fail_at_the_start(photos, tmp_path, monkeypatch):
    """A proxy that nobody is behind stands for no network. Weights on disk need none. KERAS_HOME has them, if given."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv(USERS_KERAS_HOME, raising=False)
    file = tmp_path / "models" / "weights_mobilenet_v3_small_224_1.0_float.h5"
    done = run("python", 1, ROOT / "train.py", f"--data_dir={photos}", "--model=keras:MobileNetV3Small", "--pretrained",
               f"--output_dir={tmp_path}/run", cold=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert (f"/mobilenet_v3/{file.name} cannot be downloaded: " in done.stderr and f"save it as {file}," in done.stderr)
    assert not (tmp_path / "run").exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    monkeypatch.setenv(USERS_KERAS_HOME, str(tmp_path))
    check_weights("keras:MobileNetV3Small")
    assert can_be_had("keras:MobileNetV3Small") and not can_be_had("keras:VGG16")
    with pytest.raises(UserError, match=r"/vgg16_.* cannot be downloaded"):
        check_weights("keras:VGG16")


@pytest.mark.parametrize("proxy", ["http://proxy:port", '"http://127.0.0.1:9"', "http://me:secret@127.0.0.1:{port}"])
def test_an_odd_proxy_is_named_without_its_password(proxy, monkeypatch, tmp_path):
    """One without a port, one in quotes, and one that answers what is not HTTP."""
    class Garbage(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1000)
            self.request.sendall(b"garbage\r\n\r\n")

    monkeypatch.setenv(USERS_KERAS_HOME, str(tmp_path))
    with socketserver.TCPServer(("127.0.0.1", 0), Garbage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = proxy.format(port=server.server_address[1])
        monkeypatch.setenv("https_proxy", proxy)
        with pytest.raises(UserError, match="cannot be downloaded: ") as raised:
            check_weights("keras:MobileNetV3Small")
    assert f"(https_proxy is {proxy.rpartition('@')[2]})" in str(raised.value) and "secret" not in str(raised.value)


def test_a_file_of_weights_that_is_not_there_fails_before_tensorflow_is_loaded(photos, tmp_path):
    program = ("import sys, train; code = train.main(['train.py', *sys.argv[1:]]); "
               "sys.exit(99 if 'tensorflow' in sys.modules else code)")
    done = run("python", 1, "-c", program, f"--data_dir={photos}", "--model=keras:VGG16",
               f"--pretrained_weights={tmp_path}/none.h5", f"--output_dir={tmp_path}/run", cold=True)
    assert done.returncode == 1 and done.stderr == f"train.py: {tmp_path}/none.h5 does not exist, or is no file\n"


def test_a_tilde_is_the_home_folder(monkeypatch, photos):
    monkeypatch.setenv("HOME", str(photos.parent))
    assert parsed(f"--data_dir=~/{photos.name}", "--output_dir=~/run").recipe.data_dir == str(photos)
    assert parsed("--output_dir=~/run").run.output_dir == f"{photos.parent}/run"


def test_the_help_has_the_defaults_of_the_recipe(photos):
    shown = [flags.help_text(["train.py", *words, "--help"]) for words in ([], [f"--data_dir={photos}"],
                                                                          ["--flagfile=images"])]
    for text, optimizer, batch in zip(shown, ("lars", "adam", "sgd"), (128, 2, 256), strict=True):
        assert f"Optimizer. (default: {optimizer})" in text and f"(default: {batch})" in text
