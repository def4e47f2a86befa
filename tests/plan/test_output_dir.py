"""What a training says before TensorFlow is imported about the run that it resumes."""
import pytest

from plan import output_dir
from plan.flags import parse


@pytest.mark.parametrize(("flags", "earlier", "says"), [
    (["--precision=mixed_float16"], ("--persistent", "--nopersistent"), "was false and is now true"),
    (["--precision=mixed_float16", "--nopersistent_batch_norm"], ("--nopersistent", "--persistent"),
     "was true and is now false"),
    (["--precision=mixed_float16"], ("", ""), None),
    (["--precision=mixed_float16", "--resume=never"], ("--persistent", "--nopersistent"), None),
    (["--precision=float32"], ("--persistent", "--nopersistent"), None)])
def test_another_batch_norm_on_gpus_is_one_line(flags, earlier, says, tmp_path, capsys):
    settings = parse(["train.py", f"--output_dir={tmp_path}", *flags])
    (tmp_path / "flags.txt").write_text(settings.text.replace(*earlier))
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    output_dir.check(settings)
    lines = [line for line in capsys.readouterr().err.splitlines() if "--persistent_batch_norm" in line]
    assert [says in line for line in lines] == [True] * bool(says)
