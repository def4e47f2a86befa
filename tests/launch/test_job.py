"""How a job starts, goes on and ends: launch.job's answers, and the exit codes of launch/common.sh."""
import json
import subprocess

import pytest
from conftest import ROOT

from launch import job
from tests.rigs.gpus import gpu, pretend

RECIPES = ROOT / "recipes"
PHASES = ("--batch_size=0:96,1:192,2:96", "--epochs=3", "--workers_schedule=0:2,1:1,2:2")


@pytest.fixture
def ask(capsys, monkeypatch):
    """A function: what bash reads in an answer, as (workers, words of training), and what was said."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def answer(*words, code=0):
        assert job.main(["launch.job", "--script=any.sh", *map(str, words)]) == code
        out, err = capsys.readouterr()
        script = f'training=(); {out}\nprintf "%s\\0" "$workers" "${{training[@]}}"'
        read = subprocess.run(["bash", "-euc", script], text=True, capture_output=True, check=not code).stdout
        workers, *training = read.split("\0")[:-1] or [None]
        return workers, training, err

    return answer


def test_an_answer_is_what_bash_reads(ask):
    """Whatever a value holds. The given flags come last, because they override the recipe and its .launch file."""
    given = ["--output_dir=a 'folder' of $HOME, \"`id`\"\nin two lines", "--epochs=2"]
    for words in (["digits", *given], ["digits", "--", *given]):
        workers, training, _ = ask("--workers=3", *words)
        assert workers == "3" and training == [f"--flagfile={RECIPES}/digits.flags", *given]
    assert ask("--", *given)[:2] == ("1", given)  # a machine without GPUs has one worker
    of_train = ["--dry_run", "--workers=8", "--workers_per_node=4"]  # which has flags of these names, too
    assert ask("-workers", "3", "--", *of_train)[:2] == ("3", of_train)
    row = "sony_1811.05233/table3-experiment2"
    _, training, said = ask("--workers=8", row, "--allreduce=ring")
    assert training == [f"--flagfile={RECIPES}/{row}.flags", f"--flagfile={RECIPES}/{row}.launch", "--allreduce=ring"]
    assert said == "any.sh: table3-experiment2.launch adds --allreduce=torus --compression=fp16 --loss_scale=128\n"


def test_the_paths_are_those_of_all_flags_and_none_has_to_be_there(ask, capsys, tmp_path, monkeypatch):
    """The last value counts, as for train.py. A container that asks has not got these files yet."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "base").write_text("--data_dir=/far/first\n--expect=/far/rows\n")
    (tmp_path / "own.flags").write_text(f"--flagfile={tmp_path}/base\n--data_dir='s p'\n--output_dir=~/a\n")
    (tmp_path / "own.launch").write_text("--allreduce=ring\n")
    words = [str(tmp_path / "own.flags"), "-output_dir", "it's", "--data_dir=/far/data", "--init_checkpoint=~/run"]
    assert job.main(["launch.job", "--paths", *words]) == 0
    script = f'{capsys.readouterr().out}\nprintf "%s\\n" "$output" "${{paths[@]}}"'
    output, *paths = subprocess.run(["bash", "-euc", script], text=True, capture_output=True).stdout.splitlines()
    own = f"{tmp_path}/own"
    assert output == "it's" and {*paths} == {f"{own}.flags", f"{own}.launch", "/far/data", "/far/rows", "it's",
                                             "/home/me/run"}
    for wrong, message in (("--output_dir=s3://b/run", "nothing can be written to an address"), ("--modl=x", "'modl'")):
        assert ask("--paths", "digits", wrong, code=2)[2].count("\n") == 1
        job.main(["launch.job", "--paths", "digits", wrong])
        assert message in capsys.readouterr().err


def test_gpus_get_a_micro_batch_which_a_given_one_overrides(ask, tmp_path, monkeypatch):
    for name, value in pretend(tmp_path, [gpu(0), gpu(1)]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    job.gpus._nvidia_smi.cache_clear()
    recipe = f"--flagfile={RECIPES}/digits.flags"
    assert ask("digits", "--batch_size=256")[:2] == ("2", [recipe, "--micro_batch_size=128", "--batch_size=256"])
    assert ask("digits", "--micro_batch_size=32")[:2] == ("2", [recipe, "--micro_batch_size=32"])
    job.gpus._nvidia_smi.cache_clear()


def test_phases_follow_what_the_run_has_asked_for(ask, tmp_path):
    """A job starts on the schedule's first number, and after a requeue in a later phase on that phase's."""
    words = ["digits", *PHASES, f"--output_dir={tmp_path}"]
    assert ask("--workers=2", *words)[0] == "2"
    assert ask("--next", *words)[:2] == ("", [])  # ended with 75 in the middle of a phase
    for following in (1, 2):
        (tmp_path / "run.json").write_text(json.dumps({"next_workers": following}))
        assert ask("--workers=2", *words)[0] == ask("--next", *words)[0] == str(following)
    _, _, said = ask("--workers=1", *words, code=1)
    assert said == "any.sh: --workers_schedule=0:2,1:1,2:2 needs 2 workers, but 1 are available\n"


def test_the_plan_is_train_pys(capfd):
    assert job.main(["launch.job", "--workers=8", "--workers_per_node=4", "digits", "--batch_size=512"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["workers"] == 8 and plan["phases"][0]["global_batch_size"] == 512
    assert job.main(["launch.job", "--workers=3", "--workers_per_node=3", "digits"]) == 1
    assert "is not divisible" in capfd.readouterr().err


@pytest.mark.parametrize(("words", "code", "message"), [
    ([], 2, "any.sh: the recipe is missing; see --help\n"),
    (["--worker=4", "digits"], 2, "'worker'; did you mean --workers?"), (["--workers=x", "digits"], 2, "--workers=x"),
    (["--workers", "0", "digits"], 2, "--workers=0"), (["--workers"], 2, "--workers"), (["-workers=2.5"], 2, "2.5"),
    (["--workers_per_node=4", "digits"], 2, "needs --workers"), (["--workers=4", "--next=x", "--"], 2, "--next=x"),
    (["digits", "--worker=4"], 2, "'worker'"),
    (["digts"], 2, "any.sh: there is no recipe digts; did you mean digits?\n"),
    (["digits", "--optimizer=adagrad"], 2, "optimizer"), (["--", "--data_dir=/nowhere"], 1, "/nowhere")])
def test_an_error_is_one_line_of_the_script_that_asked(ask, words, code, message):
    _, _, said = ask(*words, code=code)
    assert said.startswith("any.sh: ") and said.count("\n") == 1 and message in said


CODES = """
. launch/common.sh
output=$1/run BIGBATCH_LOGS=$1 stopped_by=$2
touch "$1/started"
mkdir -p "$output/checkpoints"
for file in $3; do touch -d '+1 minute' "$output/$file"; done
exit_code "$4" $5
"""


@pytest.mark.parametrize(("raw", "program", "stopped_by", "written", "expected"), [
    # of mpirun and srun by itself, as for the check of the nodes
    (0, "", "", "", 0), (2, "", "", "", 2), (75, "", "", "", 75), (1, "", "", "", 1), (255, "", "USR1", "", 1),
    (138, "", "USR1", "", 75), (143, "", "TERM", "", 75), (138, "", "", "", 1), (143, "", "", "", 1),
    # mpirun 5 exits with 0 if it has lost a node
    (0, "mpirun", "", "summary.json", 0), (0, "mpirun", "", "checkpoints/checkpoint", 1),
    # a worker that fails before training, whose neighbours srun ends by SIGTERM; a phase that ends
    (75, "srun", "", "", 1), (75, "srun", "", "checkpoints/checkpoint", 75), (75, "mpirun", "", "", 75),
    (75, "srun", "USR1", "", 75),
    # Open MPI that aborts workers because one has ended on request, and a failure after a request
    (1, "mpirun", "TERM", "", 75), (1, "mpirun", "TERM", "checkpoints/checkpoint", 1), (1, "mpirun", "", "", 1)])
def test_exit_codes(raw, program, stopped_by, written, expected, tmp_path):
    done = subprocess.run(["bash", "-euc", CODES, "job", tmp_path, stopped_by, written, str(raw), program], cwd=ROOT,
                          text=True, capture_output=True, check=True)
    assert done.stdout == f"{expected}\n"
    assert ("has not finished" in done.stderr) == (raw == 0 and expected == 1)
