"""Weights & Biases' record of a training: `--observer=examples.wandb_log:Log`. Install wandb and log in."""
import wandb


class Log:
    def start(self, run):
        self.run = wandb.init(project="bigbatch", id=run.folder.name, resume="allow", config=run.flags)
        self.run.define_metric("*", step_metric="samples")

    def evaluation(self, evaluation):
        self.run.log(evaluation.row)

    def close(self):
        self.run.finish()
