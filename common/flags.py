"""Flags declared as dataclasses: a field is a flag, and its paragraph in the class's docstring is its help."""
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Sequence

from absl import flags as absl_flags

from common.errors import UsageError, one_line

KINDS = {str: "string", int: "integer", float: "float", bool: "bool"}
PARAGRAPH = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
PLAIN = {"choices": (), "low": None, "high": None, "parse": None, "alias": None, "switch": False}


class Switch(absl_flags.EnumFlag):
    """A flag with values that may also stand alone, as a boolean one: --name is true, --noname false."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.boolean = True

    def _serialize(self, value) -> str:
        return f"--{self.name}={value}"


def flag(default=None, choices: Sequence[str] = (), **options):
    """A field with more than a type and a default.

    choices: its values; with a list as default, several may be given. low, high: of numbers. parse: makes the field's
    value of what was given, a text or a list of texts; raises ValueError. alias: another name for it. switch: whether
    the flag may be given without a value, which means `true`.
    """
    parse, value = options.get("parse"), default
    if parse and default is not None:
        value = parse(default)
    return dataclasses.field(default=tuple(value) if isinstance(value, list) else value,
                             metadata=PLAIN | {"given": default, "choices": tuple(choices)} | options)


def define(*groups: type) -> absl_flags.FlagValues:
    """All flags of these dataclasses, with their defaults."""
    values = absl_flags.FlagValues()
    for group in groups:
        texts = {name: " ".join(text.split()) for name, text in PARAGRAPH.findall(group.__doc__)}
        for one in dataclasses.fields(group):
            _define(values, one, texts[one.name])
    return values


def _define(values, one, text):
    options = PLAIN | {"given": one.default} | one.metadata
    default, more = options["given"], {"help": text, "flag_values": values}
    if options["choices"]:
        kind, more["enum_values"] = "multi_enum" if isinstance(default, list) else "enum", options["choices"]
    elif isinstance(default, list):
        kind = "list"
    else:
        [type_] = {*(typing.get_args(one.type) or [one.type])} - {types.NoneType} if not options["parse"] else [str]
        kind = KINDS[type_]
        if type_ in (int, float):
            more |= {"lower_bound": options["low"], "upper_bound": options["high"]}
    if options["switch"]:
        absl_flags.DEFINE_flag(Switch(one.name, default, text, enum_values=options["choices"]), values)
    else:
        getattr(absl_flags, f"DEFINE_{kind}")(one.name, default, **more)
    if options["alias"]:
        absl_flags.DEFINE_alias(options["alias"], one.name, flag_values=values)

    def check(given):
        try:
            value(one, given)
        except ValueError as error:
            raise absl_flags.ValidationError(str(error)) from None
        return not isinstance(given, float) or math.isfinite(given)

    limits = f", {options['low']} to {options['high']}" if options["high"] is not None else ""
    absl_flags.register_validator(one.name, check, f"not a finite number{limits}", flag_values=values)


def value(one: dataclasses.Field, given):
    """A field's value of what was given for its flag."""
    parse = one.metadata.get("parse")
    return parse(given) if parse and given is not None else given


def parsed(values: absl_flags.FlagValues, group: type):
    """The flags of a dataclass, as one."""
    return group(**{one.name: value(one, values[one.name].value) for one in dataclasses.fields(group)})


def defaults(group: type) -> dict:
    """Each flag's default, before it is parsed."""
    return {one.name: one.metadata.get("given", one.default) for one in dataclasses.fields(group)}


def names(group: type) -> list[str]:
    """The flags of a dataclass."""
    return [one.name for one in dataclasses.fields(group)]


def read(values: absl_flags.FlagValues, argv: Sequence[str]) -> absl_flags.FlagValues:
    """The values, set from a command line. Raises UsageError, for what is no flag, too."""
    try:
        rest = values(argv)
    except (absl_flags.Error, UnicodeDecodeError) as error:
        text = one_line(error)
        raise UsageError(text[:1000] + nearest_value(text)) from None
    except RecursionError:  # absl looks for the flag that was meant, letter by letter
        raise UsageError("no flag has so long a name") from None
    if rest[1:]:
        raise UsageError(f"'{rest[1]}' is not a flag; --help lists them")
    return values


def nearest_value(problem: str) -> str:
    """What was probably meant, for absl's message on a value that is not among a flag's; else nothing."""
    found = re.search(r"--\w+=(.*): value should be one of <(.*)>", problem)
    close = difflib.get_close_matches(found[1], found[2].split("|"), 1, 0.5) if found else []
    return f"; did you mean {close[0]}?" if close else ""


def described(values: absl_flags.FlagValues, names: Sequence[str]) -> list[str]:
    """What a help text says of each of these flags."""
    lines = []
    for name in names:
        one = values[name]
        default = "" if one.default is None else f" (default: {one.default_as_str.strip(chr(39))})"
        lines.append(absl_flags.text_wrap(f"--{name}: {one.help}{default}", 110, "      ", "  "))
    return lines
