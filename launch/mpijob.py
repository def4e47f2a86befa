"""Prints an MPIJob of Kubeflow's MPI Operator that trains a recipe. launch/kubernetes/submit.sh runs this module.

Each worker pod runs sshd (launch/kubernetes/worker.sh). The launcher pod runs launch.pods, which starts the training
there. All pods run the image of the Dockerfile as its user 10000.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

import yaml

from common import command
from common.errors import UsageError
from common.recipe_file import RECIPES, recipe_path
from launch.horovodrun import ROOT, Parser, recipe_flags
from launch.micro_batch import SAMPLES
from launch.workers import workers_now
from training import flags

PROGRAM = "submit.sh"
TEMPLATE = ROOT / "launch" / "kubernetes" / "mpijob.yaml"
DATA, OUTPUT, RECIPE = "/data", "/output", "/recipe"  # folders in the pods
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # of a job; Kubernetes adds up to 23 characters for its pods


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    with command.shell(PROGRAM) as ending:
        ending.code = run(_options(argv))
    return ending.code


def run(options) -> int:
    """Prints or submits the job; returns the exit code. Raises UserError."""
    recipe = recipe_path(options.recipe)
    name = options.name or re.sub(r"[^a-z0-9]+", "-", recipe.stem.lower()).strip("-")
    if not NAME.fullmatch(name):
        raise UsageError(f"--name takes lower-case letters, digits and hyphens, 40 at most, not '{name}'")
    own = [f"--output_dir={OUTPUT}/{name}", *([f"--data_dir={DATA}"] if options.data else [])]
    arguments = [*recipe_flags(recipe, PROGRAM), *own, *options.flags]
    settings = flags.parse(["train.py", *arguments])
    output_dir = settings.run.output_dir
    if not Path(output_dir).is_relative_to(OUTPUT):
        raise UsageError(f"--output_dir={output_dir} is lost with the pods; give a folder in {OUTPUT}")
    options.slots_per_worker = options.slots_per_worker or options.gpus_per_worker or 1
    workers = workers_now(settings, options.workers * options.slots_per_worker)
    planned = [f"--workers={workers}", f"--workers_per_node={options.slots_per_worker}", f"--train_samples={SAMPLES}"]
    code = subprocess.call([sys.executable, str(ROOT / "train.py"), *arguments, "--dry_run", *planned],
                           stdout=None if options.dry_run else subprocess.DEVNULL)
    if code or (options.dry_run and not options.apply):
        return code
    is_own = not recipe.is_relative_to(RECIPES)
    path = f"{RECIPE}/{recipe.name}" if is_own else str(recipe.relative_to(ROOT))
    checks = ["--no-preflight"] if options.no_preflight else []
    found = manifests(options, name, recipe if is_own else None, [output_dir, *checks, path, *own, *options.flags])
    text = yaml.dump_all(found, Dumper=Dumper, sort_keys=False, width=120)
    if not options.apply:
        print(text, end="")
        return 0
    ask = ["--dry-run=server"] if options.dry_run else []
    return subprocess.run(["kubectl", "apply", "--filename=-", *ask], input=text, text=True).returncode


def _options(argv):
    parser = Parser(prog="launch/kubernetes/submit.sh", description="Prints a job for Kubeflow's MPI Operator that "
                    "trains a recipe. For anything else, such as CPU requests or tolerations, edit what is printed.")
    parser.add_argument("--workers", type=int, required=True, help="number of worker pods")
    parser.add_argument("--gpus-per-worker", type=int, default=0, help="GPUs of each pod (default: 0)")
    parser.add_argument("--slots-per-worker", type=int, help="processes in each pod (default: one per GPU, or one)")
    parser.add_argument("--image", required=True, help="image that the Dockerfile builds")
    parser.add_argument("--name", help="name of the job (default: the recipe's). The run goes to /output/NAME")
    parser.add_argument("--data", metavar="CLAIM", help="volume claim of the dataset, in the pods /data")
    parser.add_argument("--output", metavar="CLAIM", help="volume claim of the runs, in the pods /output")
    parser.add_argument("--rdma", metavar="RESOURCE", help="resource of the network cards, such as rdma/ib")
    parser.add_argument("--no-preflight", action="store_true", help="do not check the pods first")
    parser.add_argument("--apply", action="store_true", help="submit the job with kubectl instead of printing it")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print the plan instead; with --apply, "
                        "also ask the cluster whether it would take the job")
    parser.add_argument("recipe", help="file of flags, or its name in launch/recipes")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of train.py, which override the recipe")
    return parser.parse(argv)


def manifests(options, name: str, recipe: Path | None, arguments: list[str]) -> list[dict]:
    """Returns the job, and before it a ConfigMap with a recipe that the image lacks. arguments: of launch.pods."""
    job, found = yaml.safe_load(TEMPLATE.read_text()), []
    spec = job["spec"]
    pods = [spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker")]
    [launcher], [worker] = (pod["containers"] for pod in pods)
    job["metadata"]["name"] = name
    spec["slotsPerWorker"] = options.slots_per_worker
    spec["mpiReplicaSpecs"]["Worker"]["replicas"] = options.workers
    launcher["args"] += arguments
    pods[1]["volumes"][0]["emptyDir"]["sizeLimit"] = f"{options.slots_per_worker}Gi"  # of /dev/shm: 1 GiB per process
    if options.gpus_per_worker:
        worker["resources"]["limits"]["nvidia.com/gpu"] = options.gpus_per_worker
    if options.rdma:
        worker["resources"]["limits"][options.rdma] = 1
        worker["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if recipe:
        files = {path.name: path.read_text() for path in (recipe, recipe.with_suffix(".launch")) if path.is_file()}
        found = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-recipe"}, "data": files}]
        _mount(pods[0], RECIPE, configMap={"name": f"{name}-recipe"})
    for pod in pods:
        pod["containers"][0]["image"] = options.image
        for folder, claim in ((DATA, options.data), (OUTPUT, options.output)):
            if claim:
                _mount(pod, folder, persistentVolumeClaim={"claimName": claim, "readOnly": folder == DATA})
    return [*found, job]


def _mount(pod, folder, **volume):
    name = folder.strip("/")
    pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": folder})
    pod["volumes"].append({"name": name, **volume})


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
