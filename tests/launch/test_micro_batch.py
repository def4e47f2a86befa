"""Which micro-batch the launch scripts give to GPUs."""
import json
import subprocess
from dataclasses import replace

import pytest
from conftest import ROOT, scripts_environment

from launch.job import micro_batch_flags
from plan import flags
from plan.plan import make_plan, plan_for
from plan.recipes import RECIPES
from tests.rigs.gpus import gpu, pretend


@pytest.mark.parametrize("given, workers, memory, expected", [
    (["--batch_size=8192"], 8, 32.0, 256), (["--batch_size=8192"], 8, 80.0, 256),
    (["--batch_size=8192"], 8, 16.0, 128), (["--batch_size=8192"], 8, 11.0, None),
    (["--batch_size=8192"], 8, None, None), (["--batch_size=8192"], 64, 80.0, 128),
    (["--batch_size=16000", "--batch_norm_span=auto"], 8, 80.0, 250), (["--batch_size=4096"], 64, 80.0, None),
    (["--batch_size=8192", "--micro_batch_size=32"], 8, 80.0, None),
    (["--batch_size=8192", "--device=cpu"], 8, 80.0, None),
    (["--batch_size=8192", "--batch_norm_span=32"], 8, 80.0, 256),
    (["--batch_size=8192", "--batch_norm_span=48"], 8, 80.0, None),
    (["--batch_size=8192", "--batch_norm_span=64"], 8, 80.0, None),
    (["--batch_size=8192", "--batch_norm_span=0:32,30:64"], 8, 80.0, 256),
    (["--batch_size=8192", "--batch_norm_span=512"], 8, 80.0, None),  # 256 would make two workers share statistics
    (["--batch_size=0:8192,30:12288"], 8, 80.0, 256), (["--batch_size=0:3072,30:5120"], 8, 80.0, 128),
    (["--batch_size=8191"], 8, 80.0, None),
    (["--batch_size=8192"], 8, 30.0, 256), (["--batch_size=8192"], 8, 14.0, 128),
    (["--batch_size=8192", "--precision=mixed_float16"], 8, 15.78, 256),  # NVIDIA's size on a V100 of 16 GB
    (["--batch_size=8192", "--image_size=448"], 8, 80.0, 128),
    (["--batch_size=8192", "--image_size=448"], 8, 32.0, None),
    (["--batch_size=8192", "--image_size=0:128,30:448"], 8, 16.0, 32),
    (["--batch_size=8192", "--image_size=448", "--batch_norm_span=64"], 8, 16.0, None),
    (["--batch_size=8192", "--freeze"], 8, 8.0, 256),
    (["--batch_size=8192", "--model=keras:MobileNetV3Small"], 8, 5.0, 128),
    (["--batch_size=8192", "--model=keras:MobileNetV3Small", "--freeze"], 8, 5.0, 256),
    (["--batch_size=8192", "--model=convnet", "--image_size=32"], 8, 8.0, 256),
    (["--batch_size=8192", "--model=convnet", "--image_size=512"], 8, 8.0, 128),
    (["--batch_size=8192", "--model=examples.own_network:network", "--image_size=32"], 8, 8.0, 256),
    (["--batch_size=8192", "--model=no_module:absent"], 8, 80.0, None),  # training says so
])
def test_the_largest_that_divides_and_keeps_the_recipe(given, workers, memory, expected):
    settings = flags.parse(["train.py", "--data_dir=synthetic:100000", "--model=resnet50", "--image_size=224",
                            "--epochs=60", *given])
    found = micro_batch_flags(settings, workers, memory)
    assert found == ([f"--micro_batch_size={expected}"] if expected else [])
    if expected:  # every phase is the recipe's, with its batch and its span
        plain, larger = (make_plan(settings.recipe, size, workers, 100_000).phases for size in (None, expected))
        span = settings.recipe.batch_norm_span
        for before, after in zip(plain, larger, strict=True):
            assert (before.global_batch_size, before.steps) == (after.global_batch_size, after.steps)
            assert after.batch_norm_span == (span(before.start_epoch) if span else expected)


@pytest.mark.parametrize(("node", "memory", "xla"), [("v100", 15.78, "false"), ("a100", 39.39, "true")])
def test_a_node_trains_the_rows_of_lars_in_16_bits_with_their_plan(node, memory, xla):
    """Nothing of the recipe changes but the precision. In float32, a V100 of 16 GB has room for 128 images."""
    rows = sorted((RECIPES / "lars_1708.03888").glob("table[567]-*.flags"))
    assert len(rows) == 14
    for row in rows:
        plain, mixed = (flags.parse(["train.py", f"--flagfile={row}", *words]) for words in (
            [], [f"--flagfile={node}.launch"]))
        assert replace(mixed.recipe, precision="float32", loss_scale=None) == plain.recipe
        assert (mixed.recipe.precision, mixed.recipe.loss_scale, mixed.launch.xla) == ("mixed_float16", 128.0, xla)
        ours, theirs = (plan_for(settings, 8, 8, 1_281_167).as_json() for settings in (mixed, plain))
        assert ours == theirs
    mixed = flags.parse(["train.py", f"--flagfile={row.with_name('table7-resnet50-8192.flags')}",
                         f"--flagfile={node}.launch"])
    assert micro_batch_flags(mixed, 8, memory) == ["--micro_batch_size=256"]


@pytest.mark.parametrize(("sizes", "workers", "expected"), [
    ([32], 8, 32), ([128, 128], 8, 128), ([64], 8, None), ([64, 32], 8, None), ([1024], 16, 256)])
def test_a_resumed_run_keeps_its_size(sizes, workers, expected, tmp_path):
    """That of plan.json, unless it is the default, also of several phases, or more than a worker now has."""
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    phases = [{"micro_batch_size": size} for size in sizes]
    (tmp_path / "plan.json").write_text(json.dumps({"phases": phases}))
    settings = flags.parse(["train.py", "--data_dir=synthetic:100000", "--model=resnet50", "--batch_size=8192",
                            f"--output_dir={tmp_path}"])
    assert micro_batch_flags(settings, workers, 80.0) == (
        [f"--micro_batch_size={expected}"] if expected else [])


@pytest.mark.parametrize("span", [64, 128])
def test_a_span_that_keeps_a_gpu_busy_is_the_micro_batch(span):
    """TensorFlow fuses a batch norm over the whole micro-batch only, with what follows it."""
    settings = flags.parse(["train.py", "--data_dir=synthetic:100000", "--batch_size=8192",
                            f"--batch_norm_span={span}"])
    assert not micro_batch_flags(settings, 8, 80.0)
    [phase] = make_plan(settings.recipe, None, 8, 100_000).phases
    assert phase.micro_batch_size == phase.batch_norm_span == span


@pytest.mark.parametrize("given, expected", [
    ((), ["--micro_batch_size=128"]), (("--micro_batch_size=32",), ["--micro_batch_size=32"])])
def test_dgx1_gives_it_to_each_worker_and_the_user_wins(tmp_path, given, expected):
    environment = scripts_environment() | pretend(tmp_path, [gpu(0), gpu(1)])
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([ROOT / "launch" / "dgx1.sh", "--dry-run", "digits", "--batch_size=256", *given], text=True,
                          capture_output=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    words = done.stderr.replace("'", "").split()
    assert [word for word in words if "micro_batch" in word] == expected
    [phase] = json.loads(done.stdout)["phases"]
    assert phase["micro_batch_size"] == int(expected[0].partition("=")[2])


def test_horovodrun_asks_the_hosts_for_their_gpus(tmp_path):
    environment = scripts_environment() | pretend(tmp_path, [gpu(0), gpu(1, memory__total=16160)])
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([ROOT / "launch" / "horovodrun.sh", "--dry-run", "-np", "2", "digits", "--batch_size=1024",
                           "--model=resnet50", "--image_size=224"],
                          text=True, capture_output=True, timeout=300, env=environment)
    assert done.returncode == 0 and "--micro_batch_size=128" in done.stderr, done.stderr
