"""How the workers of a run begin: with the same flags, and where the training before them ended."""
import sys

from common.errors import complain
from distributed import world as worlds
from distributed.world import World
from plan.settings import Settings
from training import build
from training.build import Job

DIFFERENT_FLAGS = "the workers were started with different flags"


def start_and_check_flags(settings: Settings) -> World:
    """Starts Horovod without a gradient exchange. Raises UserError unless all ranks have the same flags."""
    launch, timeline = settings.launch, settings.run.timeline
    build.set_variables(settings)
    world = worlds.start(settings.recipe.seed, launch.is_deterministic, timeline=timeline, device=launch.device,
                         threads=launch.threads)
    world.agree(settings.flags, DIFFERENT_FLAGS)
    worlds.check_gpus(world, launch.device_policy)
    return world


def report_start(job: Job, workers_before: int | None) -> None:
    """Begins a new slice of the stream if the number of workers has changed, and reports where training continues.

    workers_before: number of workers of the loaded snapshot, or None at the start of a training.
    """
    progress, world, plan = job.state.progress, job.world, job.plan
    lines, where = [], ""
    if plan.allreduce.is_fallback:
        lines.append(f"--allreduce={job.settings.launch.allreduce} continues with a "
                     f"{plan.allreduce.allreduce}: {plan.allreduce.why}")
    by_file = not job.feed.dataset.train.any_order
    if by_file:
        what = "batches, and the pairs of --mixup and --cutmix," if job.feed.mixing else "batches"
        lines.append(f"--order=file: the order within a file is fixed, and {what} depend on the number of workers")
    if workers_before not in (None, world.size):
        where = f", on {world.size} workers instead of {workers_before}"
        if progress.step > progress.reshard_step and by_file:
            lines.append(f"--order=file: with {world.size} workers instead of {workers_before}, some samples of "
                         "this epoch are read twice and others not at all")
        progress.reshard_step = progress.step
    if world.rank == 0:
        for line in lines:
            complain(line)
        if workers_before:
            print(f"resumed after step {progress.step} of {plan.steps}{where}", file=sys.stderr)
