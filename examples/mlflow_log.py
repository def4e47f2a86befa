"""MLflow's record of a training: `--observer=examples.mlflow_log:Log`. Install mlflow, or mlflow-skinny.

RUN/mlflow_run.txt holds the identity of MLflow's run, which a resumed training continues.
"""
import mlflow


class Log:
    def start(self, run):
        kept = run.folder / "mlflow_run.txt"
        resumed = kept.read_text() if run.progress.step and kept.exists() else None
        active = mlflow.start_run(run_id=resumed, run_name=run.folder.name)
        kept.write_text(active.info.run_id)
        if not resumed:
            mlflow.log_params(run.flags)  # which MLflow never changes

    def evaluation(self, evaluation):
        numbers = {name: value for name, value in evaluation.row.items() if name != "weights"}
        mlflow.log_metrics(numbers, step=numbers["samples"])

    def end(self, summary):
        mlflow.end_run("FINISHED")

    def close(self):
        mlflow.end_run("FAILED")  # without effect after `end`
