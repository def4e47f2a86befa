"""--profile: which steps it holds, in a file that TensorBoard's profile plugin opens, and when none is written."""
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from conftest import TINY, train

from training.monitoring import Profile


def spaces(folder: Path) -> list:
    """The profiles of a run, as the profile plugin reads them."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return [xplane_pb2.XSpace.FromString(path.read_bytes())
            for path in sorted((folder / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))]


def profiled_steps(space) -> list[int]:
    """The steps that TensorFlow's markers name, from which the plugin makes its page of step times."""
    [host] = [plane for plane in space.planes if plane.name == "/host:CPU"]
    numbers = {number: metadata.name for number, metadata in host.stat_metadata.items()}
    return [stat.int64_value for line in host.lines for event in line.events
            if host.event_metadata[event.metadata_id].name == "train"
            for stat in event.stats if numbers[stat.metadata_id] == "step_num"]


@pytest.mark.trainings
def test_a_profile_holds_the_steps_of_rank_0_and_is_kept_by_a_resumed_run(tmp_path):
    flags = (*TINY, "--epochs=1", "--profile=2:5", f"--output_dir={tmp_path}")
    done = train(*flags, kind="mpirun", workers=2)
    assert done.stderr.count("train.py: profile of steps 2 to 4: tensorboard --logdir=") == 1
    [space] = spaces(tmp_path)
    assert profiled_steps(space) == [2, 3, 4]
    [host] = [plane for plane in space.planes if plane.name == "/host:CPU"]
    assert sum(len(line.events) for line in host.lines) > 100
    again = train(*flags)
    assert "warning: --profile=2:5: no profile is written, because training continues after step" in again.stderr
    assert len(spaces(tmp_path)) == 1 and len([*(tmp_path / "tensorboard").glob("events.out.tfevents.*")]) == 1


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda folder: made.append("start"))
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: made.append("stop"))
    return made


def trained(profile, calls, steps, resumed_at=0, in_all=100):
    """Launches the steps, each before the result of the one before is known."""
    profile.start(SimpleNamespace(folder=Path("/nowhere"), plan={"steps": in_all},
                                  progress=SimpleNamespace(step=resumed_at)))
    for number in range(resumed_at, steps):
        with profile.launching(number):
            calls.append(number)
        if number > resumed_at:
            profile.step(SimpleNamespace(number=number - 1))
    profile.close()
    return calls


@pytest.mark.parametrize(("resumed_at", "steps", "expected", "said"), [
    (0, 7, [0, 1, "start", 2, 3, 4, 5, "stop", 6], "profile of steps 2 to 4: tensorboard --logdir=/nowhere"),
    (3, 7, ["start", 3, 4, 5, "stop", 6], "profile of steps 3 to 4: "),
    (0, 4, [0, 1, "start", 2, 3, "stop"], "profile of steps 2 to 3: "),
    (5, 7, [5, 6], "no profile is written, because training continues after step 5"),
    (0, 2, [0, 1], "no profile is written, because training ended before step 2")])
def test_the_profile_begins_before_and_ends_after_its_steps(calls, capsys, resumed_at, steps, expected, said):
    assert trained(Profile(2, 5), calls, steps, resumed_at) == expected
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_training_that_is_too_short_says_so_at_once(calls, capsys):
    assert trained(Profile(2, 5), calls, 2, in_all=2) == [0, 1]
    assert capsys.readouterr().err == ("bigbatch: warning: --profile=2:5: no profile is written, because the last step "
                                       "is 1\n")
