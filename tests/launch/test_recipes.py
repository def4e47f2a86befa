"""Every recipe plans, names its row and says what it chose; the page that lists them is up to date."""
import pytest

from common.errors import UserError
from launch import recipe_list
from training import flags
from training.plan import Plan, plan_for

PAPERS = sorted(path for folder in recipe_list.PAPERS for path in (recipe_list.RECIPES / folder).glob("*.flags"))
IMAGENET = 1281167
# Rows that the issue names, batch by batch: recipe -> (peak rate, steps of each phase on ImageNet).
BY_HAND = {
    "table1-resnet50-8192": (6.4, [90 * IMAGENET // 8192]),
    "section3.1-goyal-resnet50-8192": (3.2, [90 * IMAGENET // 8192]),
    "table7-resnet50-32768-known": (32, [90 * IMAGENET // 32768]),
    "table3-experiment1": (34, [30 * IMAGENET // 34816, 60 * IMAGENET // 69632]),
    "table3-experiment3": (29, [30 * IMAGENET // 55296, 60 * IMAGENET // 65536]),
    "table3-experiment4": (34, [30 * IMAGENET // 34816, 15 * IMAGENET // 69632, 30 * IMAGENET // 87040,
                                15 * IMAGENET // 121856]),
}


def plan(path, workers) -> Plan:
    settings = flags.parse(["train.py", f"--flagfile={path}"])
    return plan_for(settings, workers, 4, settings.run.train_samples)


def test_there_is_one_for_each_row():
    count = {folder: sum(path.parent.name == folder for path in PAPERS) for folder in recipe_list.PAPERS}
    # LARS: tables 1 (2), 2 (3), 3 (3), 5 (3), 6 (3), 7 (4 and 2 beside it), section 3.1 (2).
    assert count == {"lars_1708.03888": 22, "sysml18": 5, "sony_1811.05233": 5}


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("workers", [1, 8, 256])
def test_it_plans(path, workers):
    if path.stem == "table4-resnet50-16000" and workers == 256:  # 62.5 a worker
        with pytest.raises(UserError, match="15872 and 16128"):
            plan(path, workers)
        return
    made = plan(path, workers)
    assert made.phases[-1].end_epoch == made.epochs >= 90


@pytest.mark.parametrize(("name", "workers"), [
    ("table3-reference", 1024), ("table3-experiment1", 2176), ("table3-experiment2", 3456),
    ("table3-experiment3", 2048), ("table3-experiment4", 17408), ("table4-resnet50-16000", 1600),
    ("table4-resnet50-32768", 2048), ("alexnet-32768", 2048)])
def test_it_plans_at_its_papers_scale(name, workers):
    path, = (path for path in PAPERS if path.stem == name)
    assert plan(path, workers).workers == workers


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    path, = (path for path in PAPERS if path.stem == name)
    made = plan(path, 8)
    assert (made.learning_rate.peak, [phase.steps for phase in made.phases]) == BY_HAND[name]


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_its_comment_says_where_it_comes_from(path):
    fields = recipe_list.read(path)
    assert all(fields[name] for name in ("title", "Row", "Reported", "Left open", "Workers"))
    launch_flags = {"micro_batch_size", "dali_device", "compression", "xla", "output_dir"}
    assert not launch_flags & fields.keys()  # a recipe never mentions workers or devices


def test_the_page_lists_them():
    assert (recipe_list.RECIPES / "README.md").read_text() == recipe_list.page()
    assert all(path.name in recipe_list.page() for path in PAPERS)
