"""MODULE:NAME, against what Python's own import says of it."""
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

from common import own
from common.errors import UserError
from plan.flags import check_own, parse

FILES = {
    "plain.py": "from os import path as way\nimport json, xml.dom\nif json:\n    def inner(): pass\n"
                "for looped in range(3): pass\n[a, *rest] = 1, 2\nclass Log:\n    def method(self): pass\n"
                "try:\n    import no_such_module\nexcept ImportError as error: pass\n",
    "stars.py": "from plain import *\n",
    "lazy.py": "def __getattr__(name):\n    if name == 'late':\n        return print\n    raise AttributeError(name)\n",
    "mapped.py": "globals().update({'a' + 'b': print})\n",
    "package/__init__.py": "from .inner import made\n", "package/inner.py": "def made(): pass\n",
    "moved/__init__.py": "__path__.append(__path__[0] + '/there')\n", "moved/there/deep.py": "def net(): pass\n",
    "bare/one.py": "def net(): pass\n", "bare/below/two.py": "def net(): pass\n",
    "legacy.py": "# -*- coding: latin-1 -*-\n# \xe4\ndef net(): pass\n",
}
FOUND = ["plain:inner", "plain:way", "plain:json", "plain:xml", "plain:looped", "plain:a", "plain:rest", "plain:Log",
         "plain:Log.method", "stars:inner", "lazy:late", "mapped:ab", "package:made", "package:inner.made",
         "package.inner:made", "moved.there.deep:net", "moved.deep:net", "bare.one:net", "bare.below.two:net",
         "legacy:net", "os.path:join", "os:fork", "math:sqrt", "_ctypes:Structure", "numpy:einsum", "sys:exit"]
ABSENT = ["plain:absent", "plain:method2", "plain.inner:x", "nowhere:net", "package.nowhere:net", "package:absent",
          "bare:net", "bare.three:net"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()


def test_what_python_finds_is_found_and_what_it_does_not_is_named(here):
    """In a process of its own, Python imports each; `check` imports none."""
    program = ("import functools, importlib, sys\nsys.path.append('')\nfor name in sys.argv[1:]:\n"
               "    module, _, attribute = name.partition(':')\n    try:\n"
               "        functools.reduce(getattr, attribute.split('.'), importlib.import_module(module)); print('-')\n"
               "    except Exception as error: print(type(error).__name__)")
    imported = subprocess.run([sys.executable, "-c", program, *FOUND, *ABSENT], env=environment(), text=True,
                              capture_output=True, check=True).stdout.split()
    assert imported[:len(FOUND)] == ["-"] * len(FOUND) and "-" not in imported[len(FOUND):]
    for name in FOUND:
        own.check("--model", name)
    for name, kind in zip(ABSENT, imported[len(FOUND):], strict=True):
        with pytest.raises(UserError, match=f"^--model={name}: {kind}: "):
            own.check("--model", name)
    assert not sys.modules.keys() & {name.partition(":")[0] for name in FOUND[:FOUND.index("os.path:join")]}


@pytest.mark.parametrize(("text", "cure"), [
    ("./plain:inner", "give plain:inner"), ("plain.py:inner", "give plain:inner"),
    ("package/inner.py:made()", "give package.inner:made"), ("{here}/plain.py:Log", "give plain:Log"),
    ("plain/", "give plain:NAME"), ("plain.py", "give plain:NAME"), ("package/inner/:made", "give package.inner:made"),
    ("/elsewhere/plain:inner", "give plain:inner, and /elsewhere in PYTHONPATH"),
    ("../a b/plain:inner", "give plain:inner, and ../a b in PYTHONPATH"),
    ("my-net:f", "rename my-net.py to my_net.py, because Python's names have no hyphens; give my_net:f")])
@pytest.mark.parametrize("flag", ["--model", "--augmentation", "--observer"])
def test_a_path_or_a_hyphen_gets_the_name_to_give(flag, text, cure, here, tmp_path):
    with pytest.raises(UserError) as problem:
        settings = parse(["train.py", f"{flag}={text.format(here=tmp_path)}", "--image_size=32", "--dry_run"])
        check_own(settings)  # plain.py:inner may be a module
    said = str(problem.value).replace(str(tmp_path), "")
    assert said.endswith(f"; {cure}") and len(said) < 200


def test_the_file_that_was_found_is_named(here, tmp_path):
    """The user's is behind Python's path: a package of this checkout, a module of Python's, imported or not."""
    for name in ("data", "plan", "colorsys", "json"):
        (tmp_path / f"{name}.py").write_text("def net(): pass\n")
        for act in (own.check, own.load):
            with pytest.raises(UserError, match=rf"^--model={name}:net: AttributeError: module '{name}' has no "
                               rf"attribute 'net'; Python finds it in /.*\.py, which hides ./{name}.py: rename that$"):
                act("--model", f"{name}:net")
    with pytest.raises(UserError, match=rf"no attribute 'absent'; Python finds it in {tmp_path}/plain.py$"):
        own.check("--model", "plain:absent")


def test_code_that_is_called_leaves_the_working_folder_as_it_was(here, tmp_path):
    (tmp_path / "moving.py").write_text("import os\nos.chdir('/')\ndef fail():\n    os.chdir('/usr')\n    1 / 0\n")
    fail = own.load("--model", "moving:fail")
    assert Path.cwd() == tmp_path
    with pytest.raises(UserError, match=f"^it: ZeroDivisionError: .*{tmp_path}/moving.py, line 5.$"), own.calling("it"):
        fail()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("flag", ["--model=plain:absent", "--observer=nowhere:Log"])
@pytest.mark.parametrize("mode", ["--dry_run", "--epochs=1"])
def test_it_ends_train_py_before_anything_heavy_is_imported(flag, mode, here):
    done = subprocess.run([sys.executable, "-X", "importtime", ROOT / "train.py", flag, mode, "--image_size=32"],
                          env=environment(), text=True, capture_output=True, timeout=300)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and not done.stdout
    assert [line.startswith(f"train.py: {flag}: ") for line in lines if not line.startswith("import time:")] == [True]
    assert not {"tensorflow", "plain"} & {line.rpartition("|")[2].strip() for line in lines}
