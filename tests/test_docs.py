"""README and docs: links lead somewhere, commands run, every flag is explained."""
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, environment, forks, require_fashion, require_tool, rows, skip, unwrapped
from PIL import Image

from common.flags import names
from docs import flag_list, report_image, results
from experiments import planned
from plan.settings import Launch, Recipe, Run
from tests.rigs.trainings import TIMES, untimed

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- test: (\w+) -->\n)?```sh\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Who runs a block of commands: these tests, by default or in the campaign; or what it needs.
INSTALL_UV = "pip install --target .uv uv && "
RUN, ELSEWHERE = ("run", "campaign"), {"this", "fit", "network", "gpu", "cluster", "container", "cuda"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(who runs it, its commands) of each block of commands."""
    return BLOCK.findall(page.read_text())


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_run_somewhere(page):
    assert {who for who, _ in blocks(page)} <= {*RUN, *ELSEWHERE}


def test_every_flag_is_explained():
    assert flag_list.PAGE.read_text() == flag_list.page()
    for group in (Recipe, Launch, Run):
        assert {f"`--{name}`" for name in names(group)} <= set(re.findall(r"`--\w+`", flag_list.page()))


def test_the_site_has_every_page():
    listed = re.findall(r"^ +- .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.fixture
def checkout(tmp_path, digit_records) -> Path:
    """A copy of this checkout without its history, with a folder IMAGES of a few digits."""
    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT,
                           text=True, capture_output=True, check=True).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(BIN.parent)
    for number, (encoded, label) in enumerate(digit_records["train"][:300]):
        folder = tmp_path / "IMAGES" / f"class-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded)
    return tmp_path


def run_blocks(page: Path, who: str, checkout: Path) -> None:
    """Runs a page's blocks in its order, in one shell each that ends at the first failure.

    `uv run` takes the environment as it is, and `python` is a fork (rigs/warm.py). As root, mpirun asks for permission.
    """
    script = "\n".join(commands for marked, commands in blocks(page) if marked == who)
    if "recipes/study/" in script:
        require_fashion()
    script = script.replace(INSTALL_UV, "").replace(".uv/bin/uv run ", "uv run ")
    script = script.replace("uv run ", f"'{sys.executable}' -m uv_run ")
    (checkout / "uv_run.py").write_text(
        "import os, sys\n"
        "words = sys.argv[1:]\n"
        "words = ['python', *words] if words[0].endswith('.py') else words\n"
        "os.execvp(words[0], words)\n")
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{suffix}": "1" for name in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    done = subprocess.run(["bash", "-euxo", "pipefail", "-c", script], cwd=checkout, text=True, capture_output=True,
                          timeout=1500, stdin=subprocess.DEVNULL,
                          env=environment() | allowed | {
                              "PYTHONPATH": str(checkout), "PATH": f"{forks()}{os.pathsep}{environment()['PATH']}"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if "run" in dict(blocks(page))], ids=lambda page: page.name)
def test_commands_run(page, checkout):
    run_blocks(page, "run", checkout)


@pytest.mark.campaign
@pytest.mark.parametrize("page", [page for page in PAGES if "campaign" in dict(blocks(page))],
                         ids=lambda page: page.name)
def test_longer_commands_run(page, checkout):
    run_blocks(page, "campaign", checkout)


def run_first_command(checkout: Path, **variables) -> dict:
    """The plan that README's first command prints, with a distribution's Python and pip alone on the path."""
    require_tool("/usr/bin/pip")
    [command] = [commands for _, commands in blocks(ROOT / "README.md") if "train.py\n" in commands]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(["bash", "-euc", command.replace("train.py", "train.py --dry_run")], cwd=checkout, text=True,
                          capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
                          env=kept | {"PATH": "/usr/local/bin:/usr/bin:/bin"} | variables)
    if "WARNING: Retrying" in done.stderr and "No matching distribution found for uv" in done.stderr:
        skip("an index of packages that pip reaches")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout[done.stdout.index("{"):])


def test_the_first_command_with_a_distributions_pip(checkout):
    """It may install nothing into that Python (PEP 668)."""
    assert run_first_command(checkout, UV_NO_SYNC="1")["epochs"] == 12
    ignored = ["git", "check-ignore", "--no-index", "--quiet", ".uv/bin/uv"]
    assert subprocess.run(ignored, cwd=ROOT).returncode == 0


@pytest.mark.campaign
def test_the_first_command_installs_everything(checkout):
    """Into a new environment, without what benchmarks need. The second command then collects the tests."""
    (checkout / ".venv").unlink()
    assert run_first_command(checkout)["epochs"] == 12
    installed = {path.name for path in (checkout / ".venv").glob("lib/python3.11/site-packages/*")}
    assert "tensorflow" in installed and not installed & {"matplotlib", "font_roboto"}
    [command] = [commands for who, commands in blocks(ROOT / "README.md") if who == "this"]
    done = subprocess.run(["bash", "-euc", command.strip() + " --collect-only -q"], cwd=checkout, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0 and " tests collected" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_kept_runs_with_and_without_a_disturbance_are_the_same_to_the_bit():
    """All but the times. The second one was killed, went on on two workers, and ended on one."""
    one, other = (results.SAME_BITS / name for name in ("undisturbed", "disturbed"))
    assert len(rows(one)) == 5 and rows(one)[-1].keys() >= {*TIMES, "weights", "val_loss", "train_loss"}
    assert untimed(one) == untimed(other)
    assert results.same_bits() in results.DOCUMENT.read_text()


@pytest.mark.parametrize("path", report_image.PICTURES)
def test_the_picture_of_the_report_is_of_todays_recipe_and_has_readmes_figures(path):
    with Image.open(path) as picture:
        about = picture.text
    assert json.loads(about["flags"]) == report_image.recipe_flags()
    assert f"validation: {about['result']}" in (ROOT / "README.md").read_text()


def test_the_results_are_those_of_the_runs_that_are_kept():
    """The page has the generated table, and each accuracy is that of the images counted in its evaluation."""
    page, kept = results.DOCUMENT.read_text(), results.runs()
    readme, index = unwrapped("README.md"), unwrapped("docs/index.md")
    assert results.table(kept) in page and results.FIGURE.exists()
    for name, seeds in kept.items():
        mean = statistics.fmean(one.top1 if one.views_top1 is None else one.views_top1 for one in seeds)
        assert f"{mean:.2f} %{' in the mean of' * (len(seeds) > 1)}" in readme and f"{mean:.2f} %" in index
        for number, one in enumerate(seeds):
            folder = results.PUBLISHED / name / f"seed{number}"
            trained = checked_summary(folder, number, one)
            assert f"{one.top1:.2f}" in page
            if one.views_top1 is not None:
                evaluated = json.loads((folder / "evaluation.json").read_text())
                views = evaluated["views_val_top1_count"] / evaluated["val_samples"]
                assert one.views_top1 == pytest.approx(100 * views) and f"{one.views_top1:.2f}" in page
                assert evaluated["val_top1_count"] == trained["val_top1_count"]  # the checkpoint of the last update


def test_the_runs_at_a_large_batch_have_the_best_rate_and_momentum_of_the_search():
    """Each best rate and momentum has a worse one on either side. The pages have their tables and means."""
    readme, large_batches = unwrapped("README.md"), (ROOT / "docs" / "large_batches.md").read_text()
    page, kept, tried = results.DOCUMENT.read_text(), results.runs(results.LARGE_BATCH), results.trials("search")
    assert all(part in page for part in (results.rules(kept), results.search("search"), results.search("longer")))
    best = {}
    for line in planned.lines_of(ROOT / "recipes" / "study" / "resnet20.runs"):
        rule = line.get("optimizer", "sgd")
        momenta = tried[rule]
        assert all(min(rates) < max(rates, key=rates.get) < max(rates) for rates in momenta.values())
        best[rule] = float(line["momentum"]), float(line["learning_rate"])
        momentum = max(momenta, key=lambda one: max(momenta[one].values()))
        assert min(momenta) < momentum < max(momenta)
        assert best[rule] == (momentum, max(momenta[momentum], key=momenta[momentum].get))
    assert best.keys() == tried.keys()
    for name, seeds in kept.items():
        top1 = [one.top1 for one in seeds]
        mean = f"{statistics.fmean(top1):.1f} %"
        assert f" reaches {mean}" in readme or f" {mean} with " in readme
        assert len(top1) == 1 or f"| {mean} ({min(top1):.1f} to {max(top1):.1f}) |" in large_batches
        for number, one in enumerate(seeds):
            checked_summary(results.LARGE_BATCH / name / f"seed{number}", number, one)
            assert best[one.flags["optimizer"]] == (float(one.flags["momentum"]), float(one.flags["learning_rate"]))


def checked_summary(folder, number, one):
    """Checks a kept run's seed and accuracy. Returns its summary.json."""
    trained, about = (json.loads((folder / f"{file}.json").read_text()) for file in ("summary", "run"))
    assert one.top1 == pytest.approx(100 * trained["val_top1_count"] / trained["val_samples"])
    assert not about["git"]["changed"] and f"--seed={number}" in about["command"]
    return trained
