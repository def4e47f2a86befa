"""Every module, file, function, class, constant and flag that README and docs name in backticks exists."""
import functools
import re
from pathlib import Path

import pytest
from conftest import ROOT

from plan import flags

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {".git", ".venv", ".uv", "runs", "build"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
IN_A_FILE = re.compile(r"((?:`\w+`(?:, | and )?)+),? (?:in|of|from)(?: a file of)? `([\w./]+)`")
PROGRAM = re.compile(r"(?:^|\s)(?:\S*/)?(?:(train\.py|(?:launch|benchmarks)/[\w/]+\.sh)|python -m ([\w.]+)|"
                     r"((?:data|experiments|launch|reporting)\.\w+))(?=\s|$)")
FLAG = re.compile(r"--([a-zA-Z][\w-]*)(?:=(.*))?")
NAME = re.compile(r"(?P<dotted>[A-Za-z_][\w.]*\w)?(?:\((?P<arguments>.*)\)(?: -> \w+)?)?")  # a name, a call
FILE = re.compile(r"[\w.-]+\.(?:py|sh|flags|runs|launch|md|cfg|toml|yaml|jsonl?|csv|html|txt|log|png|jpg|svg|onnx|h5|"
                  r"tflite|h|cc|a)")
PLACEHOLDER = re.compile(r"[A-Z]{2,}|\bN\b|^\d|[*…]|\.\.\.")  # in a path, or in the value of a flag
DEFINITIONS = [re.compile(pattern) for pattern in (
    r"\b(?:def|class) (\w+)", r"\b(\w+)(?==|: | =)", r"[(,] ?\**(\w+)(?=[,):=])", r"\"([^\"\s]+)\"")]
ARGUMENT = re.compile(r"(?:^|,)\s*\**(?!self\b)(\w+)")
TRAINS = flags.define()
OF_ABSL = {"help", "helpfull", "flagfile"}
# Of Slurm, docker, Apptainer, Kubernetes and uv.
FOREIGN_FLAGS = {"batch", "build-arg", "compile-bytecode", "follow", "mpi", "no-cache", "no-deps", "nv",
                 "reinstall-package"}
FOREIGN = {  # of Keras, Horovod, NCCL, Pillow, Kubernetes, Linux and CUDA, and files that a reader writes
    "DistributedOptimizer", "ImageOps", "Model", "NCCL_NET_GDR_LEVEL", "PYTHONDONTWRITEBYTECODE", "ReadOnlyMany",
    "ReadWriteMany", "SrunPortRange", "beta_1", "compile", "fit.py", "hosts.sh", "hvd", "nccl.h", "openmpi",
    "pam_slurm_adopt", "prted", "prterun", "spec", "tf", "transposing.json", "v3.0", "waiting.json"}


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def modules() -> list[Path]:
    found = [path for folder in sorted(FOLDERS) for path in (ROOT / folder).rglob("*.py")] + [ROOT / "train.py"]
    return [path for path in found if path != Path(__file__)]


@functools.cache
def words() -> set[str]:
    """What our code defines, its strings without spaces, such as the keys of JSON, and the names of our files."""
    code = "\n".join(map(text, modules()))
    found = {word.rpartition("/")[2] for pattern in DEFINITIONS for word in pattern.findall(code)}
    scripts = [text(path) for pattern in ("launch/**/*.sh", "launch/**/*.yaml", "benchmarks/*.sh")
               for path in ROOT.glob(pattern)]
    found |= {*re.findall(r"[\w.-]+", re.sub(r"(?m)(?:^|\s)#.*", "", "\n".join(scripts)))}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return found | {path.name for path in files} | {path.stem for path in files} | {"train.py"}


@functools.cache
def arguments() -> list[tuple[str, list[str]]]:
    """(name of a function, its arguments)"""
    found = re.findall(r"def (\w+)\((.*?)\)(?: ->|:)", "\n".join(map(text, modules())), re.DOTALL)
    return [(name, ARGUMENT.findall(between)) for name, between in found]


@functools.cache
def flags_of(program: Path) -> set[str]:
    """The options in a program, and in the module that its class Options comes from."""
    code = text(program)
    if source := re.search(r"^from ([\w.]+) import (?:.*, )?Options\b", code, re.MULTILINE):
        code += text(module(source[1])[0])
    return {*re.findall(r"(?:--|alias=\")([a-zA-Z][\w-]*)", code), *re.findall(r"^    (\w+): ", code, re.MULTILINE)}


@functools.cache
def all_flags() -> set[str]:
    programs = [path for path in modules() if "__main__" in text(path)] + [*ROOT.glob("launch/**/*.sh")]
    return {*TRAINS, *OF_ABSL, *FOREIGN_FLAGS, *(flag for path in programs for flag in flags_of(path))}


def module(dotted: str) -> tuple[Path | None, list[str]]:
    """(the file of the longest prefix that is a module, the other names)"""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file, parts[count:]
    return None, parts


def defines(path: Path, name: str) -> bool:
    """Whether a file, or one of a folder, defines a name. A file that is not Python only has to contain it."""
    if path.is_dir():
        return any(defines(file, name) for file in path.glob("*.py"))
    patterns = [pattern.pattern.replace(r"(\w+)", name).replace(r"([^\"\s]+)", name) for pattern in DEFINITIONS]
    return re.search("|".join(patterns) if path.suffix == ".py" else rf"\b{name}\b", text(path)) is not None


def wrong_flag(name: str, value: str, program: Path | None) -> str | None:
    """What is wrong with a flag. program: whose it is, or None if it stands alone."""
    of_train = program is None or program.name == "train.py"
    known = all_flags() if program is None else {*TRAINS, *OF_ABSL} | (set() if of_train else flags_of(program))
    if not {name, name.removeprefix("no")} & known:
        return f"no flag --{name}" + (f" of {program.relative_to(ROOT)}" if program else "")
    choices = getattr(TRAINS[name].parser, "enum_values", None) if of_train and name in TRAINS else None
    is_known = value in (choices or ()) or (":" in (value or "") and not wrong_name(value.replace(":", "."), []))
    is_wrong = choices and value and not is_known and not PLACEHOLDER.search(value)
    return f"--{name} has no value {value}" if is_wrong else None


def wrong_command(command: str, is_in_prose: bool = True) -> list[str | None]:
    """What is wrong with our program in a command and its flags, or with flags that stand alone, and with paths."""
    paths = [word.partition("=")[2] or word for word in command.split() if "/" in word]
    found = [None if (ROOT / path).exists() or PLACEHOLDER.search(path) or path.partition("/")[0] not in FOLDERS
             else f"no file {path}" for path in paths]
    program, after = None, command if is_in_prose else ""
    if parts := PROGRAM.search(command):
        script, dotted = parts[1], parts[2] or parts[3]
        program, rest = (ROOT / script, []) if script else module(dotted)
        if not script and dotted.partition(".")[0] not in FOLDERS:
            return found  # pytest and other modules
        if not program or rest or not program.is_file():
            return [f"no program {script or dotted}"]
        twin = program.with_suffix(".py")  # launch/horovodrun.sh hands its words on to launch/horovodrun.py
        program, after = twin if twin.is_file() else program, command[parts.end():]
    return found + [wrong_flag(*flag.groups(), program) for word in after.split() if (flag := FLAG.fullmatch(word))]


def wrong_name(dotted: str | None, given: list[str]) -> str | None:
    """What is wrong with a name. given: arguments of it; if there is no name, all arguments of some function."""
    if not dotted:
        return None if not given or any(given == each for _, each in arguments()) else f"no function ({given})"
    if {dotted, dotted.partition(".")[0]} & FOREIGN:
        return None
    file, rest = module(dotted) if "." in dotted else (None, dotted.split("."))
    if (file and rest and not defines(file, rest[0])) or (not file and not {*rest} <= words()):
        return f"no name {dotted}"
    taken = [each for name, each in arguments() if name in (dotted.rpartition(".")[2], "__init__")]
    return None if not given or any({*given} <= {*each} for each in taken) else f"no {dotted} takes {given}"


def wrong(span: str) -> list[str | None]:
    """What is wrong with a text in backticks."""
    if FILE.fullmatch(span):
        return [None if span in words() | FOREIGN or PLACEHOLDER.search(span) else f"no file {span}"]
    if name := NAME.fullmatch(span):
        given = re.findall(r"(?:^|, )([a-z_]\w*)(?==|,|$)", name["arguments"] or "")
        return [wrong_name(name["dotted"], given)]
    if chain := re.fullmatch(r"\w+(?: → \w+)+", span):
        return [wrong_name(name, []) for name in chain[0].split(" → ")]
    if imported := re.fullmatch(r"from ([\w.]+) import (\w+)", span):
        return [wrong_name(f"{imported[1]}.{imported[2]}", [])]
    return wrong_command(span)


def prose(page: Path) -> str:
    """A page without its blocks of code, in one line."""
    return re.sub(r"\s+", " ", FENCE.sub("", text(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page):
    found = [problem for span in SPAN.findall(prose(page)) for problem in wrong(span)]
    found += [problem for language, code in FENCE.findall(text(page)) if language == "sh"
              for line in code.replace("\\\n", " ").splitlines() for problem in wrong_command(line, is_in_prose=False)]
    found += [f"no {name} in {path}" for names, path in IN_A_FILE.findall(prose(page)) if (ROOT / path).exists()
              for name in re.findall(r"`(\w+)`", names) if not defines(ROOT / path, name)]
    assert [*filter(None, dict.fromkeys(found))] == []


def test_no_foreign_name_is_left_over():
    written = "\n".join(map(text, PAGES))
    assert [name for name in (*FOREIGN, *(f"--{flag}" for flag in FOREIGN_FLAGS)) if name not in written] == []


def test_the_page_for_keras_names_every_argument_of_lars():
    *_, lars = re.findall(r"def __init__\((.*?)\):", text(ROOT / "optim" / "lars.py"), re.DOTALL)
    named = re.findall(r"\w+", " ".join(SPAN.findall(prose(ROOT / "docs" / "keras.md"))))
    assert {*ARGUMENT.findall(lars)} - {"name", "kwargs"} <= {*named}
