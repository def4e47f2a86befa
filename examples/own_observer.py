"""An observer of one's own: writes a line for each evaluation to epochs.csv in the run's folder.

    uv run train.py --data_dir=DATA --observer=examples.own_observer:Table
"""
NAMES = ("epoch", "train_loss", "val_loss", "val_top1")


class Table:
    def start(self, run):
        self._path = run.folder / "epochs.csv"
        if not self._path.exists():  # a resumed run goes on with the file
            self._path.write_text(",".join(NAMES) + "\n")

    def evaluation(self, evaluation):
        with open(self._path, "a") as file:
            file.write(",".join(str(evaluation.row[name]) for name in NAMES) + "\n")
