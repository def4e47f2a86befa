"""MODULE:NAME, against what Python's own import says of it."""
import importlib
import subprocess
import sys

import pytest
from conftest import ROOT, environment

from common import own
from common.errors import UserError

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


@pytest.mark.parametrize("flag", ["--model=plain:absent", "--observer=nowhere:Log"])
@pytest.mark.parametrize("mode", ["--dry_run", "--epochs=1"])
def test_it_ends_train_py_before_anything_heavy_is_imported(flag, mode, here):
    done = subprocess.run([sys.executable, "-X", "importtime", ROOT / "train.py", flag, mode, "--image_size=32"],
                          env=environment(), text=True, capture_output=True, timeout=300)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and not done.stdout
    assert [line.startswith(f"train.py: {flag}: ") for line in lines if not line.startswith("import time:")] == [True]
    assert not {"tensorflow", "plain"} & {line.rpartition("|")[2].strip() for line in lines}
