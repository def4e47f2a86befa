"""A thousand bad flag files and damaged dataset folders: an exit code and one line, never a traceback, never a hang."""
import json
import shutil

import pytest
from conftest import ROOT, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train
from plan import flags


def examples(number):
    return settings(max_examples=number, deadline=60_000, suppress_health_check=list(HealthCheck))


NAMES = sorted(name for group in flags.GROUPS.values() for name in flags.flags.names(group) if name != "data_dir")


def check(capfd, *arguments):
    """train.py --dry_run, in this process: either a plan, perhaps with remarks, or a line that says what is wrong."""
    code = train.main(["train.py", *arguments, "--dry_run"])
    out, err = capfd.readouterr()
    if code == 0:
        json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert len(err.splitlines()) < 10 and "Traceback" not in err
    else:
        assert code in (1, 2) and not out
        assert err.startswith("train.py: ") and err.count("\n") == 1 and len(err) < 2000


numbers = st.one_of(st.integers(-3, 10**6), st.floats(), st.sampled_from(
    ["", "nan", "inf", "-0", "1e999", "1e-320", "0x10", "1_000", "10m", "m", "٣", "9" * 400]))
values = st.one_of(
    numbers.map(str), st.text(max_size=20),
    st.lists(st.tuples(numbers, numbers), max_size=4).map(lambda pairs: ",".join(f"{a}:{b}" for a, b in pairs)),
    st.lists(numbers.map(str), max_size=4).map(",".join),
    st.sampled_from(["lars", "poly", "gradual", "linear", "resnet50", "alexnet", "evaluate", "/", "/dev/null", ".",
                     "0:64,30:128", "noise_scale", "multistep", "30,60", "true", "False"]))
lines = st.one_of(
    st.tuples(st.sampled_from(NAMES), values).map(lambda pair: f"--{pair[0]}={pair[1]}"),
    st.tuples(st.sampled_from(NAMES), values).map(lambda pair: f"--{pair[0]} {pair[1]}"),
    st.sampled_from(NAMES).map(lambda name: f"--no{name}"),
    st.text(max_size=30), st.just("--flagfile=/nonexistent"), st.just("# a comment"), st.just("--"))


given_flag_files = given(content=st.one_of(
    st.lists(lines, max_size=6).map(lambda items: "\n".join(items).encode("utf-8", "replace")),
    st.binary(max_size=60)))


def flag_files(content, capfd, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "drawn.flags"
    path.write_bytes(content)
    check(capfd, f"--flagfile={path}", "--train_samples=5000")


test_flag_files = examples(50)(given_flag_files(flag_files))
test_many_flag_files = pytest.mark.campaign(examples(1000)(given_flag_files(flag_files)))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6)


@st.composite
def damages(draw):
    """A function that damages a copy of the digits' folder."""
    kind = draw(st.sampled_from(["replace", "remove", "bytes", "cut", "gone", "folder"]))
    name = draw(st.sampled_from(["dataset.json", "index", "records"]))
    position, value, content = draw(st.floats(0, 0.999)), draw(json_values), draw(st.binary(min_size=1, max_size=9))

    def damage(folder):
        endings = {"dataset.json": ".json", "index": ".idx", "records": ".tfrecord"}
        path = sorted(path for path in folder.iterdir() if path.name.endswith(endings[name]))[0]
        if kind in ("replace", "remove"):
            path = folder / "dataset.json"
            described = json.loads(path.read_text())
            *keys, last = path_at(described, position)
            target = described
            for key in keys:
                target = target[key]
            if kind == "remove":
                del target[last]
            else:
                target[last] = value
            path.write_text(json.dumps(described))
            return
        data = path.read_bytes()
        at = int(position * len(data))
        if kind == "bytes":
            path.write_bytes(data[:at] + content + data[at + len(content):])
        elif kind == "cut":
            path.write_bytes(data[:at])
        else:
            path.unlink()
            if kind == "folder":
                path.mkdir()

    return damage


def path_at(described, position):
    """The keys that lead to one of the values in a nest of dicts and lists."""
    def walk(node, keys):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            yield [*keys, key]
            yield from walk(child, [*keys, key])

    every = list(walk(described, []))
    return every[int(position * len(every))]


def damaged_folders(damage, digits, capfd, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(digits, folder)
    damage(folder)
    check(capfd, f"--data_dir={folder}")


test_damaged_folders = examples(50)(given(damage=damages())(damaged_folders))
test_many_damaged_folders = pytest.mark.campaign(examples(1000)(given(damage=damages())(damaged_folders)))


@pytest.mark.parametrize("content", [b"--data_dir=\x00", b"\xff\xfe--epochs=1", b"--flagfile=\n--epochs", b"-" * 5000])
def test_in_a_process_of_its_own(content, tmp_path):
    (tmp_path / "bad.flags").write_bytes(content)
    done = run("python", 1, ROOT / "train.py", f"--flagfile={tmp_path}/bad.flags")
    assert done.returncode in (1, 2) and not done.stdout and len(done.stderr.splitlines()) == 1
