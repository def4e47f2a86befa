"""Flags declared as dataclasses. Each field is a flag."""
import dataclasses
import difflib
import io
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from absl import flags as absl_flags

from common import own
from common.errors import UsageError, complain, one_line

KINDS = {str: "string", int: "integer", float: "float", bool: "bool"}
PLAIN = {"choices": (), "low": None, "high": None, "parse": None, "alias": None, "switch": False, "own": False,
         "repeated": False, "path": False, "written": False}
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
GPUS = ("gpus", "num_gpus", "ngpus")
ELSEWHERE = {  # name of a flag or value in other programs -> name here
    "lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "resize": "image_size", "dataset": "data_dir",
    **dict.fromkeys(GPUS, "workers"), "cuda": "gpu", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}


class PathParser(absl_flags.ArgumentParser):
    """Parses a path. Its ~ is the home folder, also where a shell leaves it as it is.

    written: whether the program writes there, which it cannot do at an address, such as s3://BUCKET.
    """

    def __init__(self, written: bool = False):
        self.written = written

    def parse(self, argument: str) -> str:
        if not argument:
            raise ValueError("the path is empty; give one, or omit it")
        if self.written and ADDRESS.match(argument):
            raise ValueError("nothing can be written to an address; give a path, and copy the files from there")
        return os.path.expanduser(argument)


class Switch(absl_flags.EnumFlag):
    """An enum flag that also works without a value, as a boolean one: --name means true, --noname means false."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.boolean = True

    def _serialize(self, value) -> str:
        return f"--{self.name}={value}"


class Own(absl_flags.EnumFlag):
    """An enum flag that also takes MODULE:NAME, for what a user has written."""

    def _parse(self, argument):  # absl shares a parser among flags with the same choices
        module = str(argument).partition(":")[0]
        is_mistyped = any(choice.startswith(f"{module}:") for choice in self.parser.enum_values)  # such as keras:NAME
        if own.SPELLING.fullmatch(str(argument)) and not is_mistyped:
            return argument
        if cure := own.respelled(str(argument)):
            raise absl_flags.IllegalFlagValueError(f"flag --{self.name}={argument}: it is not MODULE:NAME{cure}")
        try:
            return super()._parse(argument)
        except absl_flags.IllegalFlagValueError as error:
            raise absl_flags.IllegalFlagValueError(f"{error}, or your own as MODULE:NAME") from None


def flag(default, help: str, choices: Sequence[str] = (), **options):
    """Declares a field of a dataclass as a flag. If the default is a list, the flag takes several values.

    help: its text in --help.
    choices: allowed values.
    Options:
    low, high: bounds of a number.
    parse: function that converts the given text, or list of texts, to the field's value. It raises ValueError.
    alias: another name of the flag.
    switch: whether the flag may be given without a value, which means `true`.
    own: whether MODULE:NAME is allowed besides the choices.
    repeated: whether each value of a list has its own --flag=VALUE. Otherwise commas separate the values. A list with
        choices is always repeated.
    path: whether the text, or each of a list, is a path, in which ~ is the home folder.
    written: whether the program writes to this path.
    Any other option is kept in the field's metadata.
    """
    parse = options.get("parse")
    value = parse(default) if parse and default is not None else default
    return dataclasses.field(default=tuple(value) if isinstance(value, list) else value,
                             metadata=PLAIN | {"given": default, "help": help, "choices": tuple(choices)} | options)


def define(*groups: type) -> absl_flags.FlagValues:
    """Defines all flags of these dataclasses, with their defaults."""
    values = absl_flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow arguments
    for group in groups:
        for field in dataclasses.fields(group):
            _define(values, field)
    return values


def _define(values, field):
    options, text = field.metadata, field.metadata["help"]
    default = options["given"]
    more = {"help": text, "flag_values": values}
    if options["choices"]:
        kind = "multi_enum" if isinstance(default, list) else "enum"
        more["enum_values"] = options["choices"]
    elif isinstance(default, list):
        kind = "multi_string" if options["repeated"] else "list"
    else:
        [type_] = {*(typing.get_args(field.type) or [field.type])} - {types.NoneType} if not options["parse"] else [str]
        kind = KINDS[type_]
        if type_ in (int, float):
            more |= {"lower_bound": options["low"], "upper_bound": options["high"]}
    if options["switch"] or options["own"]:
        kind = Switch if options["switch"] else Own
        absl_flags.DEFINE_flag(kind(field.name, default, text, enum_values=options["choices"]), values)
    else:
        getattr(absl_flags, f"DEFINE_{kind}")(field.name, default, **more)
    if options["path"]:
        values[field.name].parser = PathParser(options["written"])
    if options["alias"]:
        absl_flags.DEFINE_alias(options["alias"], field.name, flag_values=values)

    def check(given):
        try:
            value(field, given)
        except ValueError as error:
            raise absl_flags.ValidationError(str(error)) from None
        return not isinstance(given, float) or math.isfinite(given)

    limits = f" from {options['low']} to {options['high']}" if options["high"] is not None else ""
    absl_flags.register_validator(field.name, check, f"must be a finite number{limits}", flag_values=values)


def value(field: dataclasses.Field, given):
    """Converts a flag's value as absl parsed it to the field's value."""
    parse = field.metadata["parse"]
    return parse(given) if parse and given is not None else given


def counts(texts: Sequence[str], most: int, needed: str) -> tuple[int, ...]:
    """Parses different whole numbers from 1 to `most`. Raises ValueError, whose message is `needed`."""
    if not all(text.isdecimal() and 0 < int(text) <= most for text in texts):
        raise ValueError(needed)
    return tuple(dict.fromkeys(map(int, texts)))


def parsed(values: absl_flags.FlagValues, group: type, only: Sequence[str] = ()):
    """Returns the flags of a dataclass as an instance of it. only: names; the other flags have their default."""
    return group(**{field.name: value(field, values[field.name].value) for field in dataclasses.fields(group)
                    if not only or field.name in only})


def defaults(group: type) -> dict:
    """Returns each flag's default, before parsing."""
    return {field.name: field.metadata["given"] for field in dataclasses.fields(group)}


def names(group: type) -> list[str]:
    """Returns the names of a dataclass's flags."""
    return [field.name for field in dataclasses.fields(group)]


def read(values: absl_flags.FlagValues, argv: Sequence[str], hints: Mapping[str, str] = MappingProxyType({})
         ) -> absl_flags.FlagValues:
    """Sets the values from a command line. Raises UsageError, also for arguments that are not flags.

    hints: as in `read_with_arguments`.
    """
    if rest := read_with_arguments(values, argv, hints):
        raise not_a_flag(values, argv, rest[0])
    return values


def split(values: absl_flags.FlagValues, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a command line up to the first word that is neither a flag nor the value of one of these flags, and the
    words from there on, as they are, which are for another program."""
    end = 1
    while end < len(argv) and argv[end].startswith("-") and argv[end] != "--":
        name = argv[end].lstrip("-")
        end += 1 + (name in values and not values[name].boolean)
    return [*argv[:end]], [*argv[end:]]


def not_a_flag(values: absl_flags.FlagValues, argv: Sequence[str], word: str) -> UsageError:
    """Returns the error for a word of a command line that is no flag, but perhaps the value of the switch before it."""
    before = argv[argv.index(word) - 1] if word in argv else ""  # a flag file may have it
    name = before.lstrip("-")
    is_value = name in values and word in (getattr(values[name].parser, "enum_values", None) or ())
    cure = f"give {before}={word}" if is_value else (
        f"give --{word}" if "=" in word and word.partition("=")[0] in values else "--help lists all flags")
    return UsageError(f"'{word}' is not a flag; {cure}")


def read_with_arguments(values: absl_flags.FlagValues, argv: Sequence[str],
                        hints: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Sets the values from a command line and returns the arguments that are not flags, as paths. Raises UsageError.

    hints: what to say about flags of other programs, by their names.
    """
    try:
        return [PathParser().parse(argument) for argument in values([argv[0], *with_files(argv[1:])])[1:]]
    except (absl_flags.Error, ValueError) as error:
        text = one_line(error).partition(". Did you mean")[0]  # absl's compares only a name's first letters
        raise UsageError(folded(text)[:1000] + (nearest_value(text) or nearest_flag(text, values, hints))) from None
    except RecursionError:  # absl's search for a similar flag recurses once per letter
        raise UsageError("a flag name is too long; --help lists all flags") from None


def with_files(words: Iterable[str], outer: tuple[str, ...] = ()) -> list[str]:
    """Returns a command line with the lines of flag files, without comments, in place of --flagfile=FILE.

    absl's own reader fails at a byte order mark, and does not name a file that is not UTF-8. It gets what is no file.
    outer: the files that these words are in. Raises UsageError.
    """
    read = []
    for word in words:
        name, _, file = word.partition("=")
        is_file = name in ("--flagfile", "-flagfile") and os.path.isfile(file := os.path.expanduser(file))
        if not is_file:
            read.append(word)
        elif file not in outer:
            lines = [line.strip() for line in file_text(file).split("\n") if not line.startswith(("#", "//"))]
            read += with_files(filter(None, lines), (*outer, file))
    return read


def file_text(file) -> str:
    """Returns the text of a flag file, in which each line ends with \\n. Raises UsageError, and OSError."""
    return io.StringIO(decoded(Path(file).read_bytes(), file), newline=None).read()


def decoded(content: bytes, file) -> str:
    """Returns the text of a file: UTF-8, with or without byte order marks. Raises UsageError."""
    try:
        return content.decode().lstrip("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file}, line {line}, is not UTF-8; save the file as UTF-8") from None


def say_what_is_hidden(flag: str, name: str) -> None:
    """Prints how to name a file or folder of the current folder that has the name of something built in, if it exists.
    """
    if os.path.exists(name):
        complain(f"--{flag}={name} is the built-in {name}; for ./{name}, give --{flag}=./{name}")


def folded(choices: str) -> str:
    """Returns a list a|b:x|b:y, or a text with one, in which each b:... is only mentioned once, as b:NAME."""
    return re.sub(r"(?<=[<|])(\w+:)\w+(\|\1\w+)*(?=[>|])", r"\1NAME", choices)


def nearest_value(problem: str) -> str:
    """Returns a suggestion for absl's message about a value that is not allowed, or an empty string."""
    match = re.search(r"--\w+=(.*): value should be one of <(.*)>", problem)
    if not match:
        return ""
    word, choices = ELSEWHERE.get(match[1], match[1]), match[2].split("|")
    containing = [choice for choice in choices if word in choice]  # mixed_float16 for float16, rather than float32
    close = difflib.get_close_matches(word, containing, 1, 0.5) or difflib.get_close_matches(word, choices, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def nearest_flag(problem: str, values: absl_flags.FlagValues, hints: Mapping[str, str]) -> str:
    """Returns a suggestion for absl's message about an unknown flag, or an empty string."""
    match = re.match(r"Unknown command line flag '([^']+)'", problem)
    if not match:
        return ""
    name = match[1].replace("-", "_").lower()
    if name in hints:
        return f"; {hints[name]}"
    names = [*values, *(f"no{name}" for name in values if values[name].boolean)]
    close = [known] if (known := ELSEWHERE.get(name)) in values else difflib.get_close_matches(name, names, 1, 0.7) or [
        longer for longer in names if len(name) > 2 and longer.startswith(name)]
    return f"; did you mean --{close[0]}?" if close else ""


def described(values: absl_flags.FlagValues, names: Sequence[str] = ()) -> list[str]:
    """Returns the help text of each of these flags, or of all."""
    lines = []
    for name in names or values:
        meaning, choices = explained(values[name])
        listed = f" ({' | '.join(choices)})" if choices else ""
        default = f" (default: {text})" if (text := default_text(values[name])) else ""
        lines.append(absl_flags.text_wrap(f"--{name}{listed}: {meaning}{default}", 110, "      ", "  "))
    return lines


def explained(flag: absl_flags.Flag) -> tuple[str, list[str]]:
    """Returns the meaning of a flag and its allowed values, which absl puts into its help text."""
    text = flag.help.partition(";\n")[0]  # absl adds that a flag may be repeated
    choices, _, meaning = folded(text).rpartition(">: ") if text.startswith("<") else ("", "", text)
    return meaning, choices.removeprefix("<").split("|") if choices else []


def default_text(flag: absl_flags.Flag) -> str:
    return flag.default_as_str.strip("'") if flag.default not in (None, []) else ""
