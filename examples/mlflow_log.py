"""MLflow's record of a training: `--observer=examples.mlflow_log:Log`. Install mlflow, or mlflow-skinny."""
import mlflow


class Log:
    def start(self, run):
        mlflow.start_run(run_name=run.folder.name)
        mlflow.log_params(run.flags)

    def evaluation(self, evaluation):
        numbers = {name: value for name, value in evaluation.row.items() if name != "weights"}
        mlflow.log_metrics(numbers, step=numbers["samples"])

    def end(self, summary):
        mlflow.end_run("FINISHED")

    def close(self):
        mlflow.end_run("FAILED")  # without effect after `end`
