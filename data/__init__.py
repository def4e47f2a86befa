"""What is on disk, the order of samples, the DALI pipeline. Takes shards as numbers; knows nothing of Horovod."""
from pathlib import Path

from data.digits import digits

BUILT_IN = {"digits": digits}  # name -> function that returns the dataset's folder, making it when needed


def locate(data_dir: str) -> Path:
    """The folder that --data_dir means: a built-in dataset's, or the path itself."""
    return BUILT_IN[data_dir]() if data_dir in BUILT_IN else Path(data_dir).absolute()
