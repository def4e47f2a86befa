"""first_hour.html: the results of launch.first_hour next to published figures, as one self-contained page."""
import html
from pathlib import Path

from common.files import write_atomically
from reporting import charts
from reporting.page import facts, page, table

LAST = ("outcome", "note", "seconds")  # columns of every row


def write_first_hour(folder: Path, result: dict, published: list[dict]) -> Path:
    """Writes first_hour.html; returns its path.

    result: content of first_hour.json: pretend, machine, and rows, each with step, outcome, note, seconds and what its
    command measured. published: images per second of ResNet-50, each with gpu, gpus, precision, micro_batch_size.
    """
    pretended = "<b>Trial run on CPUs with tiny sizes: the numbers mean nothing.</b> " if result["pretend"] else ""
    failed = dict.fromkeys(row["step"] for row in result["rows"] if row["outcome"] in ("failed", "not run"))
    sections = [f"<p>{pretended}{len(result['rows'])} commands; failed steps: {', '.join(failed) or 'none'}.</p>",
                facts({name: ", ".join(value) if isinstance(value, list) else value
                       for name, value in result["machine"].items()})]
    for step in dict.fromkeys(row["step"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["step"] == step]
        sections += [f"<h2>{html.escape(step)}</h2>", *chart(rows, published), table(aligned(rows))]
    sections += ["<h2>Published figures</h2>", "<p>ResNet-50, in images/s. These results come from other frameworks, "
                 "containers and network layouts, so compare them with care. The column 'measured here' shows the "
                 "fastest result here with the same number of GPUs, precision and micro-batch size.</p>",
                 table([row | {"measured here": fastest(result["rows"], row)} for row in published])]
    path = folder / "first_hour.html"
    write_atomically(path, page("The first hour", sections))
    return path


def aligned(rows: list[dict]) -> list[dict]:
    """Returns the rows of a step with the same columns, and the efficiency relative to one GPU where it is measured."""
    alone = next((row["images_per_second"] for row in rows
                  if row.get("workers") == 1 and "images_per_second" in row), None)
    rows = [row | {"efficiency": f"{row['images_per_second'] / row['workers'] / alone:.1%}"}
            if alone and row["step"] == "exchange" and "images_per_second" in row else row for row in rows]
    columns = dict.fromkeys(name for row in rows for name in row if name not in ("step", *LAST))
    return [{name: row.get(name, "") for name in (*columns, *LAST)} for row in rows]


def chart(rows: list[dict], published: list[dict]) -> list[str]:
    """Returns bars of the throughput of one GPU, next to published ones in another colour."""
    ours = [(f"{row['precision']}, {row['micro_batch_size']}, XLA {row['xla']}", row["images_per_second"], False)
            for row in rows if row["step"] == "speed" and "images_per_second" in row]
    theirs = [(f"{row['gpu']}, {row['precision']}, {row['micro_batch_size']}", row["images_per_second"], True)
              for row in published if row["gpus"] == 1]
    return [charts.bars("images/s (second colour: published figures)", ours + theirs)] if ours else []


def fastest(rows: list[dict], published: dict) -> float | str:
    """Returns the most images per second of the rows that measured what was published, or an empty string."""
    what = published["gpus"], published["precision"], published["micro_batch_size"]
    return max((row["images_per_second"] for row in rows if "images_per_second" in row
                and (row["workers"], row["precision"], row["micro_batch_size"]) == what), default="")
