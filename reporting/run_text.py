"""The sentences of a run's report: the result, its state, and the plan in prose."""
import html
import time

from reporting.charts import number
from reporting.page import duration, plural
from reporting.run_data import RunData

USED = {"lars": ("momentum", "weight_decay", "trust_coefficient"), "lamb": ("weight_decay",),
        "sgd": ("momentum", "weight_decay")}  # flags of each optimizer
BY = "\u00d7"
WARMUPS = {"gradual": "rises from {warmup_learning_rate} to {after} over the first {warmup_epochs} epochs",
           "constant": "stays at {warmup_learning_rate} for the first {warmup_epochs} epochs"}
DECAYS = {"poly": "decays to the end as a polynomial with exponent {poly_power}",
          "multistep": "is divided by 10 at epoch {lr_boundaries}", "cosine": "decays to the end along a cosine",
          "constant": "stays constant"}


def result(run: RunData) -> str:
    """Returns the result in one sentence, with HTML."""
    now, flags = run.result, run.flags
    if not run.rows and not run.summary:
        return f"{subject(run)} has not been evaluated yet."
    verb = "reaches" if run.summary else "has reached"
    top1, top5 = (f"{now[name]:.2%}" if now.get(name) is not None else "no valid" for name in ("val_top1", "val_top5"))
    epochs = now.get("epochs") or now.get("epoch")
    batch = now.get("global_batch_size") or now.get("batch_size")
    count = now.get("val_samples") or (run.run.get("dataset") or {}).get("validation_samples")
    images = f"the {f'{count:,} ' if count else ''}validation images"
    data = f" of {html.escape(dataset_name(run))}" if "data_dir" in flags else ""
    workers = f" on {plural(run.workers, 'worker')}" if run.workers else ""
    return (f"{subject(run)} {verb} <b>{top1}</b> top-1 and {top5} top-5 accuracy on {images}{data} after "
            f"{plural_of_epochs(epochs)} with batch size {number(batch)}{workers}"
            + (f", in {duration(now['seconds'])}." if now.get("seconds") is not None else "."))


def subject(run: RunData) -> str:
    return html.escape(run.flags.get("model", "The model"))


def dataset_name(run: RunData) -> str:
    name = run.flags.get("data_dir", "")
    return name if "/" not in name else name.rstrip("/").rpartition("/")[2]


def plural_of_epochs(epochs) -> str:
    return f"{number(epochs)} epoch{'' if epochs == 1 else 's'}"


def published(run: RunData) -> str:
    """Returns the paper's figure for the recipe, and what this run has changed, as paragraphs, or an empty string."""
    recipe = run.run.get("recipe") or {}
    if not recipe.get("reported"):
        return ""
    changed = [f"--{name}={mine} instead of {theirs}" for name, (theirs, mine) in run.changed_flags().items()]
    noted = (f" This run differs from the recipe: {', '.join(changed)}." if changed
             else " The recipe's flags are unchanged.")
    row = f" ({recipe['row']})" if recipe.get("row") else ""
    return (f"<p><b>The paper's figure</b>{html.escape(row)}: {html.escape(recipe['reported'])}."
            f'<span class="muted">{html.escape(noted)}</span></p>')


def state(run: RunData) -> str:
    """Returns how far an unfinished run has come, or an empty string for a finished one."""
    if run.summary is not None:
        return ""
    where = f"epoch {number(run.epoch)} of {number(run.epochs)}"
    bar = f'<progress value="{run.epoch}" max="{run.epochs or 1}"></progress>'
    if run.run.get("stopped"):
        reason = html.escape(run.run["stopped"])
        return f'<div class="status problem"><b>Stopped</b> after {where}: {reason}{bar}</div>'
    if not run.run:
        return f'<div class="status problem"><b>Unfinished</b>: {where}. The run has no summary.json.{bar}</div>'
    left = ""
    if run.epoch and run.rows[-1].get("seconds"):
        left = f", about {duration(run.rows[-1]['seconds'] * (run.epochs - run.epoch) / run.epoch)} left"
    return (f'<div class="status"><b>In progress</b>: {where}{left}. This page, of '
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}, reloads itself.{bar}</div>")


def plan(run: RunData) -> list[str]:
    """Returns the plan in prose, as paragraphs."""
    made, flags, phases = run.plan, run.flags, run.plan.get("phases") or [{}]
    first, several = phases[0], len(phases) > 1
    text = []
    if {"train_samples", "steps"} <= made.keys():
        text.append(f"Training processes {made['train_samples']:,} images per epoch for "
                    f"{plural_of_epochs(made['epochs'])}, in {plural(made['steps'], 'update')} of the weights.")
    if {"global_batch_size", "micro_batch_size", "accumulation_steps"} <= first.keys() and made.get("workers"):
        batch, workers, steps = first["global_batch_size"], made["workers"], first["accumulation_steps"]
        uneven = ", of which some workers have one fewer" * (batch != workers * first["micro_batch_size"] * steps)
        text.append(f"The global batch {'of the first phase ' if several else ''}has {batch:,} images: "
                    f"{plural(workers, 'worker')} {BY} micro-batches of {first['micro_batch_size']:,} {BY} "
                    f"{plural(steps, 'accumulation step')}{uneven}.")
    if several:
        text.append(f"There are {len(phases)} phases, because the batch size, the batch-norm group or the image size "
                    "changes.")
    return [*text, *optimizer(run), *exchange(made.get("exchange") or {}), *images(flags, made)]


def optimizer(run: RunData) -> list[str]:
    flags, text = run.flags, []
    if "optimizer" in flags:
        used = USED.get(flags["optimizer"], USED["sgd"])
        listed = [f"{name.replace('_', ' ')} {tidy(flags[name])}" for name in used if name in flags]
        having = f" with {', '.join(listed)}" if listed else ""
        text.append(f"The optimizer is {flags['optimizer'].upper()}{having}.")
    if {"lr_schedule", "learning_rate", "warmup"} <= flags.keys():
        words = {name: tidy(value) for name, value in flags.items()}
        words["after"] = number(run.plan.get("peak_learning_rate"))
        warmup = WARMUPS.get(flags["warmup"], "").format_map(_Known(words))
        decay = DECAYS.get(flags["lr_schedule"], "follows its schedule").format_map(_Known(words))
        begins = warmup or f"starts at {words['after']}"
        text.append(f"The learning rate {begins}, then {decay}.")
    return text


def exchange(made: dict) -> list[str]:
    if made.get("allreduce") in (None, "none"):
        return []
    grid = f" of {made['grid'][0]} {BY} {made['grid'][1]} workers" if made.get("grid") else ""
    return [f"The workers exchange gradients in a {made['allreduce']}{grid}, by {made.get('by')} ({made.get('why')})."]


def images(flags: dict, made: dict) -> list[str]:
    sizes = [size for size in dict.fromkeys(made.get("image_size") or []) if size]
    size = f" {' then '.join(map(str, sizes))} pixels wide and high" if sizes else ""
    if "augmentation" not in flags:
        return []
    precision = f" Training computes in {flags['precision']}." if "precision" in flags else ""
    size = size or " of the size of the model"
    return [f"The images are{size}, with augmentation '{flags['augmentation']}'.{precision}"]


def tidy(value: str) -> str:
    """Returns a flag's number without superfluous digits, other text as it is."""
    try:
        return number(float(value))
    except ValueError:
        return value


class _Known(dict):
    """Fills a template even if a value is missing, as in a run of another version."""

    def __missing__(self, key):
        return "its value"
