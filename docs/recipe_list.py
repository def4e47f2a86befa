"""Writes recipes/README.md from the recipes: `uv run python -m docs.recipe_list`."""
import re

from plan.recipes import RECIPES, read

PAPERS = {
    "lars_1708.03888": "You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks, arXiv:1708.03888",
    "sysml18": "You, Zhang, Hsieh, Demmel, Keutzer: Speeding up ImageNet Training on Supercomputers, SysML 2018",
    "sony_1811.05233": "Mikami et al.: Massively Distributed SGD, arXiv:1811.05233",
    "lamb_1904.00962": "You et al.: Large Batch Optimization for Deep Learning, arXiv:1904.00962, after its first "
                       "author's code, fastalgo/imagenet_resnet50_lamb",
    "rsb_2110.00476": "Wightman, Touvron, Jégou: ResNet strikes back, arXiv:2110.00476",
    "resnet_1512.03385": "He, Zhang, Ren, Sun: Deep Residual Learning, arXiv:1512.03385, on CIFAR-10",
    "dle": "NVIDIA DeepLearningExamples, TensorFlow/Classification/ConvNets, ResNet-50 v1.5",
    "mlperf": "MLPerf Training, ResNet-50: reference convergence points, from mlperf-logging 4.1.68",
    "muon": "Muon (K. Jordan 2024; arXiv:2502.16982) with the settings of other rows",
    "airbench": "Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv:2404.00498, and its author's later "
                "program with Muon",
}
INTRODUCTION = """# Recipes

Each recipe is a file of flags. `uv run train.py --flagfile=recipes/PAPER/NAME.flags` trains it on any number of
workers that divides its batch size. `--dry_run --workers=N` shows its plan without the dataset. Without flags, train.py
reads `digits.flags`. The accuracies are those reported in the papers. Three tables have no paper: NVIDIA publishes
what its script reaches, and MLPerf how many epochs its reference needed with these settings to reach its target
([MLPerf](../docs/observers.md#mlperfs-log)). No result on ImageNet exists for the recipes of Muon.

"Rehearsed" is the verdict of `experiments.rehearse` on a small network and Fashion-MNIST, with the top-1 there
([Rehearse a row](../docs/papers.md#rehearse-a-row)).

The last column gives the source of each setting: a section or table of the paper, or a file or the later code of its
authors. `open` means that no source gives the setting. A comment in the recipe then explains the value. A caveat
says what is known to be wrong with a row, and which one to train instead. train.py and `--dry_run` print it, too.

`uv run python -m docs.recipe_list` writes this page from the recipes.
"""


def rule(fields: dict) -> str:
    """Summarizes the optimizer and the learning-rate schedule."""
    name = fields["optimizer"]
    words = ["Muon" if name == "muon" else name.upper(), fields["learning_rate"], fields["lr_schedule"]]
    if "warmup" in fields:
        words.append(f"warm-up {fields['warmup_epochs']} from {fields['warmup_learning_rate']}")
    return ", ".join(words)


def caveat(fields: dict) -> str:
    """Returns what is known to be wrong with a row, or an empty string."""
    return f". **Caveat**: {fields['Caveat']}" if "Caveat" in fields else ""


def page() -> str:
    lines = [INTRODUCTION]
    for folder, paper in PAPERS.items():
        lines += [f"\n## {paper}\n", "| recipe | row in the paper | model | batch size | schedule | epochs | "
                  "reported | rehearsed | source of each setting |",
                  f"|{' --- |' * 9}"]
        for path in sorted((RECIPES / folder).glob("*.flags"), key=_natural):
            f = read(path)
            lines.append(f"| [{path.stem}]({folder}/{path.name}) | {f['Row']} | {f['model']} | {f['batch_size']} | "
                         f"{rule(f)} | {f['epochs']} | {f['Reported']} | {f.get('Rehearsed', 'not yet')}{caveat(f)} | "
                         f"{f['Sources']} |")
    return "\n".join(lines) + "\n"


def _natural(path):
    return [int(word) if word.isdigit() else word for word in re.split(r"-b?(?=\d)|-", path.stem)]


if __name__ == "__main__":
    (RECIPES / "README.md").write_text(page())
