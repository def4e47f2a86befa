"""The frame of every HTML page: one file that fetches nothing, light or dark, readable on a phone."""
import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from reporting.charts import XAxis, number

HERE = Path(__file__).parent


class Html(str):
    """Text of a cell that is HTML."""


def page(title: str, sections: Sequence[str], reload_seconds: int | None = None, tab: str = "") -> str:
    """Returns a self-contained HTML page. reload_seconds: between two reloads by the browser. tab: title of its tab."""
    style, script = ((HERE / f"page.{kind}").read_text() for kind in ("css", "js"))
    reload = f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else ""
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8">{reload}'
            f'<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<title>{html.escape(tab or title)}</title>'
            f'<link rel="icon" href="data:,"><style>{style}</style></head><body><h1>{html.escape(title)}</h1>'
            + linked("\n".join(sections)) + f"<script>{script}</script></body></html>\n")


def linked(content: str) -> str:
    """Returns the content of a page below links to its sections, if there are several."""
    names = {title: re.sub(r"\W+", "-", title.lower()) for title in re.findall("<h2>(.*?)</h2>", content)}
    content = re.sub("<h2>(.*?)</h2>", lambda found: f'<h2 id="{names[found[1]]}">{found[1]}</h2>', content)
    links = " ".join(f'<a href="#{name}">{title}</a>' for title, name in names.items())
    return f"<nav>{links}</nav>{content}" if len(names) > 1 else content


def html_table(rows: Sequence[dict], wide: Sequence[str] = (), best: int | None = None) -> str:
    """Returns a table with a row for each dict, in a box of its own that scrolls.

    wide: columns that may wrap. best: index of a row that is bold.
    """
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{html.escape(key.replace("_", " "))}</th>' for key in rows[0])
    lines = [f"<tr{' class=best' if index == best else ''}>" + "".join(
        f"<td{' class=text' if key in wide else ''}>"
        f"{shown(value)}</td>" for key, value in row.items()
    ) + "</tr>" for index, row in enumerate(rows)]
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def shown(value) -> str:
    """Returns the content of a cell: HTML as it is, other values as text, whose flags are code."""
    return value if isinstance(value, Html) else prose(number(value))


def grouped(items: Iterable, key: Callable) -> dict[Any, list]:
    """Returns the items with each key, in the order of their first occurrence."""
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def filled_columns(rows: list[dict]) -> list[dict]:
    """Returns the rows without the columns that are empty in all of them."""
    kept = [name for name in (rows or [()])[0] if any(row[name] != "" for row in rows)]
    return [{name: row[name] for name in kept} for row in rows]


def commands(lines: dict[str, str]) -> str:
    """Returns command lines below their names, to select or, with JavaScript, to copy. lines: name -> command."""
    return "".join(f'<div class="command"><b>{html.escape(name)}</b> {code(line)}</div>'
                   for name, line in lines.items())


def code(text: str) -> str:
    """Returns text as <code> that is not broken inside of a flag."""
    return "<code>" + re.sub(r"--[a-z0-9_]+", r"<span>\g<0></span>", html.escape(text)) + "</code>"


def prose(text: str) -> str:
    """Returns plain text as HTML: what is in backticks and flags, with their values, are code."""
    parts = re.split(r"`(.+?)`|((?<![\w-])--[a-z]\w*(?:=[^\s;,]*[\w/])?)", text)
    return "".join(html.escape(plain) + code(quoted or named) * bool(quoted or named)
                   for plain, quoted, named in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True))


def facts(rows: dict) -> str:
    """Returns a table with two columns: names and values, which may wrap. Leaves out empty values."""
    lines = "".join(f'<tr><th scope="row">{html.escape(name)}</th><td class="text">'
                    f"{shown(value)}</td></tr>"
                    for name, value in rows.items() if value not in (None, ""))
    return f'<div class="scroll"><table>{lines}</table></div>'


def tiles(values: dict[str, str], below: dict[str, str]) -> str:
    """Returns the most important values, large. values: name -> text. below: name -> text below the value, small."""
    return '<dl class="tiles">' + "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        f"{f'<dd>{html.escape(below[name])}</dd>' if name in below else ''}</div>"
        for name, value in values.items()) + "</dl>"


def details(title: str, content: str) -> str:
    """Returns content that is folded until a reader opens it."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def over_epochs_and_time(rows: Sequence[dict], epochs: float, draw: Callable[[XAxis], Sequence[str]]) -> str:
    """Returns charts over epochs and over time, with a switch between the two.

    rows: all rows that are drawn, with `seconds`. epochs: end of the axis of epochs. draw: returns the charts for an
    axis.
    """
    seconds = max((row["seconds"] for row in rows), default=0)
    unit, length = ("hours", 3600) if seconds > 7200 else ("minutes", 60) if seconds > 120 else ("seconds", 1)
    by_epoch = draw(XAxis("epoch", end=epochs))
    by_time = draw(XAxis(unit, lambda row: row["seconds"] / length, seconds / length))
    return ('<div class="axes"><input type="radio" name="axis" id="by-epoch" checked><label for="by-epoch">over epochs'
            '</label><input type="radio" name="axis" id="by-time"><label for="by-time">over time</label>'
            f'<div class="charts epochs">{"".join(by_epoch)}</div>'
            f'<div class="charts time">{"".join(by_time)}</div></div>')


def constant_values(values: dict[str, Sequence], where: str) -> dict[str, str]:
    """Returns title -> a sentence, for each title whose values are all the same. where: last words of the sentence."""
    texts = {title: {number(value) for value in own} for title, own in values.items()}
    return {title: f"The {title.lower()} is {text.pop()} {where}." for title, text in texts.items() if len(text) == 1}


def duration(seconds: float | None) -> str:
    """Returns a time in words: 45 s, 3 min 20 s, 5 h 12 min."""
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min" + (f" {rest} s" if rest else "")
