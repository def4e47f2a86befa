"""Sections of a run's report: curves, step-time breakdown, gradient noise scale, errors, training images."""
import base64
import html
import math
from collections import Counter
from functools import partial

from common import metric
from common.accuracy import interval
from common.activity import PARTS
from common.run_folder import CLASSES, COLUMNS, ROWS, SAMPLE_IMAGES
from plan.flags import obstacle
from reporting import charts, heat_map, sentences
from reporting.charts import Line, XAxis, number
from reporting.page import constant_values, details, duration, html_table, over_epochs_and_time, prose
from reporting.run_data import RunData
from reporting.sentences import rounded
from training.by_class import averages, by_class, effective_samples, weakest_first

ACCURACIES = {
    metric.TRAIN_TOP1: "train top-1", metric.VAL_TOP1: "validation top-1", metric.VAL_TOP5: "validation top-5",
    **{f"{prefix}val_top{most}": f"{words}, top-{most}" for prefix, (words, _) in metric.VARIANTS.items()
       for most in (1, 5)}}
LOSSES = {metric.TRAIN_LOSS: "train", metric.VAL_LOSS: "validation",
          **{prefix + metric.VAL_LOSS: words for prefix, (words, _) in metric.VARIANTS.items()}}
PLANNED = (  # title, column of metrics.jsonl and steps.jsonl, column of the schedule in plan.json
    ("Learning rate", metric.LEARNING_RATE, "learning_rate"), ("Momentum", metric.MOMENTUM, "momentum"),
    ("Global batch size", metric.BATCH_SIZE, "global_batch_size"))
AUGMENTATIONS = "augmentation", "rand_augment", "mixup", "cutmix"  # flags
MOST_PAIRS = 15  # confused pairs of classes
MOST_CLASSES = 20  # in the table of classes
LONG = 16  # characters, above which the names of classes wrap


def curves(run: RunData) -> str:
    """Returns the curves over epochs and over time, and sentences on planned values that are constant.

    The axes end at twice the epochs trained so far: the curves then fill half of a chart, and the plan goes on ahead.
    """
    rows = [*run.rows, *run.steps]
    reached = max((row["epoch"] for row in rows), default=0)
    end = min(math.ceil(2 * reached) or run.epochs, run.epochs)
    planned_values = [(title, column, planned) for title, column, planned in PLANNED if not obstacle(column, run.flags)]
    same = constant_values({title: [row[column] for row in run.steps or run.rows] + [
        row[planned] for row in run.plan["schedule"]] for title, column, planned in planned_values}, "throughout")
    varying = [value for value in planned_values if value[0] not in same]
    return (over_epochs_and_time(rows, end, partial(curves_over, run, varying))
            + f"<p>{' '.join([*same.values(), *sentences.losses(run)])}</p>")


def curves_over(run: RunData, planned_values, x: XAxis) -> list[str]:
    """Returns the curves. planned_values: those of PLANNED to draw."""
    def present(columns):
        return [(column, label) for column, label in columns.items() if any(column in row for row in run.rows)
                and (run.has_top5 or "top5" not in column)]

    losses = [charts.line(label, run.rows, x, column, colour=colour)
              for colour, (column, label) in enumerate(present(LOSSES))]
    if run.steps:
        losses.insert(0, charts.line("train, single updates", run.steps, x, "loss", colour=0, kind="faint",
                                     clipped=True))
    best = [x.of(row) for row in run.rows if row["epoch"] == run.best["epoch"]] if len(run.rows) > 1 else []
    judged = metric.EMA_VAL_TOP1 if run.rows and metric.EMA_VAL_TOP1 in run.rows[-1] else metric.VAL_TOP1
    accuracies = [charts.line(label, run.rows, x, column, ring=best[0] if best and column == judged else None)
                  for column, label in present(ACCURACIES)]
    points = [point for point in run.run.get("expected") or () if x.title == "epoch" and point[0] <= x.end]
    if points:
        accuracies.append(Line("expected", *zip(*points, strict=True), kind="dashed"))
    first = min(float(run.flags.get("evaluate_every", 1)), run.epochs)
    empty = f"first evaluation after epoch {number(first)}" if run.state == "in progress" else "no evaluation"
    drawn = [charts.lines("Loss", x, losses, charts.LOGARITHMIC, empty=empty),
             charts.lines("Accuracy", x, accuracies, charts.PERCENT, empty=empty)]
    for title, column, planned in planned_values:
        holds = column != metric.LEARNING_RATE
        series = [charts.line("as run", run.steps or run.rows, x, column, colour=0, steps=holds)]
        if x.title == "epoch":
            series.insert(0, planned_line(run, column, planned, x.end))
        drawn.append(charts.lines(title, x, series, empty="no update yet"))
    speeds = [charts.line("images/s", run.rows, x, metric.IMAGES_PER_SECOND)]
    return [*drawn, charts.lines("Training throughput, images/s", x, speeds, charts.FROM_ZERO, empty=empty)]


def planned_line(run: RunData, done: str, column: str, end: float) -> Line:
    """Returns a planned value ahead, from the last update (column `done`) to epoch `end`.

    It has points at whole epochs, and the learning rate also at its breakpoints. It is empty if nothing is ahead.
    """
    last = [(row["epoch"], row[done]) for row in (run.steps or run.rows)[-1:]]
    reached = last[0][0] if last else -1
    holds = column != "learning_rate"
    points = [(row["epoch"], row[column]) for row in run.plan["schedule"]]
    between = [(run.epochs, points[-1][1])] if holds else run.plan["learning_rate_breakpoints"]
    ahead = sorted({(epoch, value) for epoch, value in points + between if reached < epoch <= end})
    has_more = end > run.epoch and ahead
    epochs, values = zip(*last, *ahead, strict=True) if has_more else ((), ())
    return Line("planned", epochs, values, colour=1, kind="dashed", steps=holds)


def times(run: RunData) -> list[str]:
    """Returns the step-time breakdown: its mean as a sentence, and a stacked bar for each evaluation."""
    rows = [row for row in run.times if "compute" in row]  # an evaluation without a step before it has none
    if not rows:
        return []
    means = {name: sum(row[name] for row in rows) / len(rows) for name in PARTS}
    *some, last = [f"{means[name]:.1%} to {label}" for name, label in PARTS.items()]
    parts = f"{', '.join(some)} and {last}".replace(" to", " went to", 1)
    chart = charts.stacked_bars("Step time", "epoch", [row["epoch"] for row in rows], {
        label: [row[name] for row in rows] for name, label in PARTS.items()})
    listed = html_table([{"epoch": row["epoch"]} | {label: f"{row[name]:.2%}" for name, label in PARTS.items()}
                         for row in rows])
    return ["<h2>Where the time went</h2>",
            f'<div class="charts">{chart}<div><p>Of the time of an update, {parts}.{between_updates(run)}'
            f"{sentences.storage(run)}</p>{details('Numbers', listed)}</div></div>", *slow_workers(rows)]


def slow_workers(rows: list[dict]) -> list[str]:
    """Returns the sentences on slow workers of the last evaluation that had any. rows: of times.jsonl."""
    named = [row for row in rows if row.get("slow")][-1:]
    return [f'<p class="status problem">At epoch {number(row["epoch"])}, {html.escape(sentence)}.</p>'
            for row in named for sentence in row["slow"]]


def between_updates(run: RunData) -> str:
    """Returns a sentence on the time of all updates, or an empty string if it is unknown.

    The clock of a training starts when its network is built, after TensorFlow is loaded.
    """
    trained = 0.0
    before = 0
    total = run.result.get("seconds")
    for row in run.rows:
        if row[metric.IMAGES_PER_SECOND]:
            trained += (row[metric.SAMPLES] - before) / row[metric.IMAGES_PER_SECOND]
        before = row[metric.SAMPLES]
    if not total or trained > total:
        return ""
    return (f" The updates took {duration(trained)} of the {duration(total)} after the network was built. The rest "
            "went to opening the data, evaluation and checkpoints.")


def noise_scale(run: RunData) -> list[str]:
    """Returns the gradient noise scale and the batch size over the epochs, and a schedule of batch sizes from it."""
    if not run.noise:
        return []
    certain = [row for row in run.noise if row["noise_scale"] is not None]
    x = XAxis("epoch", end=run.noise[-1]["epoch"])
    chart = charts.lines("Gradient noise scale, samples", x, [
        charts.line("noise scale", run.noise, x, "noise_scale"),
        charts.line("batch size", run.noise, x, "batch_size", steps=True)], charts.LOGARITHMIC)
    listed = html_table([{name: "unknown" if value is None else value
                          for name, value in row.items() if name != "layers"} for row in run.noise])
    return ["<h2>What a batch size is worth</h2>", f"<p>{noise_in_words(run.noise, certain)}</p>",
            f'<div class="charts">{chart}</div>', details("Estimates", listed)]


def noise_in_words(rows: list[dict], certain: list[dict]) -> str:
    """Returns sentences on the noise scale. certain: the rows in which it could be estimated."""
    if not certain:
        return (f"In the mean over {rows[-1]['updates']} updates, the gradient drowns in the noise, so the noise scale "
                "is unknown. A longer training measures more of them.")
    last = certain[-1]
    unknown = "" if last is rows[-1] else " Since then, the gradient has drowned in the noise."
    return (f"At epoch {number(last['epoch'])}, the gradient noise is about {two_digits(last['noise_scale'])} samples: "
            "batches up to that size save updates almost in proportion; beyond it they mostly cost more images."
            f"{unknown} Batch sizes that follow it: <code>--batch_size={growing_batch_size(certain)}</code>.")


def growing_batch_size(certain: list[dict]) -> str:
    """Returns a growing batch size, in powers of two up to the noise scale, as the value of --batch_size."""
    phases = []
    start = size = 0
    for row in certain:
        fitting = 2 ** max(0, math.floor(math.log2(max(1.0, row["noise_scale"]))))
        if fitting > size:
            size = fitting
            phases.append(f"{start:g}:{size}")
        start = row["epoch"]
    return ",".join(phases) if len(phases) > 1 else str(size)


def two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def mistakes(made: dict, images: str = "validation images", is_best: bool = False) -> list[str]:
    """Returns the confusion matrix, the most confused classes, all classes, and the worst errors of an evaluation.

    made: content of outcomes.json, or empty. images: what the evaluated images are. is_best: whether a sentence says
    that the evaluation is the best of several.
    """
    if not made:
        return []
    classes = made["classes"]
    counts = Counter({(label, predicted): count for label, predicted, count in made["confusion"]})
    wrong = Counter({pair: count for pair, count in counts.items() if pair[0] != pair[1]})
    drawn = [f"<h2>Errors</h2><p>After epoch {number(made['epoch'])}{', the best' * is_best}, {wrong.total():,} of "
             f"{counts.total():,} {images} are classified wrongly.</p>", '<div class="side">']
    totals = heat_map.class_totals(counts)
    pairs = html_table([{"true class": classes[label], "predicted as": classes[predicted], "images": count,
                         "of the class": f"{count / totals[label]:.1%}"}
                        for (label, predicted), count in wrong.most_common(MOST_PAIRS) if count > 1],
                       ("true class", "predicted as"))
    title = "Classes that are confused most"
    if len(classes) > heat_map.MOST_CLASSES:
        return [*drawn, per_class(made, wrong), f"<div><h3>{title}</h3>{pairs}</div></div>", *worst(made)]
    return [*drawn, heat_map.confusion(classes, counts), per_class(made, wrong), "</div>",
            details(title, pairs) if pairs else "", *worst(made)]


def per_class(made: dict, wrong: Counter) -> str:
    """Returns a table of the classes, weakest first. made: content of outcomes.json. wrong: its pairs with errors."""
    labels, predicted, counts = zip(*made["confusion"], strict=True)
    rows = by_class(labels, predicted, made["classes"], counts)
    recall, f1 = (rounded(mean, interval(mean, effective_samples(rows))) for mean in averages(rows).values())
    more = f" {len(rows) - MOST_CLASSES} more are in {CLASSES}." if len(rows) > MOST_CLASSES else ""
    confused = {}  # class -> what most of its errors are predicted as
    for (label, other), count in wrong.most_common():
        confused.setdefault(made["classes"][label], f"{made['classes'][other]} ({count:,})")
    listed = [{"class": row["class"], "recall, 95% interval": with_interval(row, "recall"),
               "most confused with": confused.get(row["class"], ""), "images": row["images"],
               "precision, 95% interval": with_interval(row, "precision")}
              for row in weakest_first(rows)[:MOST_CLASSES]]
    wide = ("class", "recall, 95% interval", "most confused with") if max(map(len, made["classes"])) > LONG else ()
    return (f"<div><h3>Classes, weakest first</h3>{html_table(listed, wide)}"
            '<p class="muted">Recall is the share of the images of a class that are predicted as it. Precision is the '
            "share of the images predicted as a class that belong to it. Over the classes, the mean recall (balanced "
            f"top-1) is {recall}, and the mean of F1, the harmonic mean of the two (macro "
            f"F1), is {f1}.{more}</p></div>")


def with_interval(row: dict, name: str) -> str:
    """Returns a fraction of a row of by_class with its interval, or an empty string if there is none."""
    bounds = row[f"{name}_low"], row[f"{name}_high"]
    return "" if row[name] is None else "{} ({} to {})".format(*(rounded(one, bounds) for one in (row[name], *bounds)))


def worst(made: dict) -> list[str]:
    """Returns the wrongly classified images with the highest losses. Old runs lack the probability."""
    shown = []
    for sample in made["worst"]:
        label, predicted = (html.escape(made["classes"][sample[name]]) for name in ("label", "predicted"))
        small = ' class="pixels"' if sample["width"] < 64 else ""
        name = html.escape(sample["name"])
        kept = 1 if ", record " in name else 2  # an image's own folder, which is its class, and not that of a shard
        file = name.rpartition(" in ")[0] or "/".join(name.split("/")[-kept:])
        sure = "" if sample.get("probability") is None else f" {sample['probability']:.0%}"
        shown.append(
            f'<figure><img{small} src="{html.escape(sample["image"])}" alt="{label}, predicted as {predicted}" '
            f'title="{name}"><figcaption><b>{label}</b> → <b>{predicted}</b>{sure}<br>'
            f'<span class="muted">{file}</span></figcaption></figure>')
    return ["<h3>Worst errors</h3><p>The wrongly classified images with the highest losses: true class → predicted "
            f'class, with its probability.</p><div class="pictures">{"".join(shown)}</div>'] if shown else []


def samples(run: RunData) -> list[str]:
    """Returns some training images as the model sees them."""
    picture, names = run.folder / SAMPLE_IMAGES, run.run["sample_classes"]
    if not names or not picture.is_file():
        return []
    source = f"data:image/jpeg;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    after = prose(", ".join(f"--{name}={value}" for name in AUGMENTATIONS
                            if (value := run.flags.get(name, "")) not in ("", "none", "0", "0.0")))
    cut = [f'<figure><div role="img" aria-label="{html.escape(name)}" style="background-position:'
           f'{100 * (index % COLUMNS) / (COLUMNS - 1):.2f}% {100 * (index // COLUMNS) / (ROWS - 1):.2f}%"></div>'
           f"<figcaption>{html.escape(name)}</figcaption></figure>" for index, name in enumerate(names)]
    return ["<h2>Training images</h2>",
            f"<p>The first images of the training as the model sees them{f', after {after}' * bool(after)}.</p>",
            f'<div class="pictures cut" style="--all:url({source});--size:{100 * COLUMNS}% {100 * ROWS}%">'
            f'{"".join(cut)}</div>']
