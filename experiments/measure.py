"""The measuring loop of experiments.benchmark: the stages of one worker, or the training steps of all workers.

Stages or batch sizes are measured in turn, several times, so that a drift of the machine's speed affects all of them. A
rate is the median over the turns. Pipelines, steps, exchange and optimizer are those of train.py, with a learning rate
of 0.
"""
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import tensorflow as tf

from common import launcher
from data.dataset import Dataset
from data.feed import Batches, Feed
from data.pipeline import STAGES
from data.synthetic import Resident
from distributed import world as worlds
from distributed.lost import is_lost
from distributed.world import World
from launch import topology as topologies
from model_zoo.cost import model_cost
from optim.schedules import Piecewise
from plan.plan import Phase, Plan, allreduce_for, divisors, make_plan
from plan.settings import Settings
from reporting import speed
from training import build
from training.bad_input import bad_input_is_user_error
from training.breakdown import StepTimes, breakdown_of
from training.build import Setup
from training.step import StepInput, StepResult

ROUNDS = 5
MOST_SAMPLES = 65_536  # per worker
AHEAD = 4  # batches; more than DALI and TensorFlow prefetch while other stages are measured
ORDER = (*STAGES, "pipeline", "model", "train")  # of the rows
TIMED = 2  # steps per turn whose waiting times are measured


@dataclass
class Measured:
    """A stage or a training step whose speed is measured."""

    name: str
    call: Callable  # starts the work on the next batch; it may return before the work is done
    batches: Batches | Resident
    images: int  # number that one call processes, on all workers
    own_images: int  # number that this worker reads for a call
    finish: Callable[[object], object] = lambda result: None  # waits for the result of a call
    ahead: int = AHEAD  # number of calls whose images may be prefetched
    times: StepTimes | None = None  # step-time breakdown of training steps
    threads: int | None = None  # of DALI
    calls: int = 1  # number in a turn
    done: int = 0  # number of calls so far
    rates: list[float] = field(default_factory=list)  # images per second of each turn

    @property
    def rate(self) -> float:
        """The images per second, on all workers."""
        return statistics.median(self.rates)

    def warm_up(self, seconds: float, world: World) -> None:
        """Compiles, and chooses the calls of a turn, equally many on all workers, to take this time."""
        self.run(1 + self.ahead)
        enough = False
        while not enough:
            taken = self.run(self.calls)
            calls = max(1, min(2 * self.calls, round(self.calls * seconds / taken)))
            self.calls, enough = world.broadcast((calls, taken >= seconds / 2), "calls")

    def turn(self) -> None:
        """Consumes the prefetched batches, then measures some calls. Of training steps, it also times a few alone."""
        if self.ahead:
            self.run(self.ahead)
        self.rates.append(self.calls * self.images / self.run(self.calls))
        for _ in range(TIMED if self.times else 0):
            began = time.perf_counter()
            result = self._finished(self._started(timed=True))
            self.times.add_timed(time.perf_counter() - began, result.waited)

    def run(self, calls: int) -> float:
        """Starts each call before it waits for the one before, as training does. Returns the seconds."""
        began = time.perf_counter()
        result = self._started()
        for _ in range(calls - 1):
            before, result = result, self._started()
            self._finished(before)
        self._finished(result)
        return time.perf_counter() - began

    def _started(self, **options):
        with self._problem_in_one_line():
            result = self.call(**options)
        self.done += 1
        return result

    def _finished(self, result):
        with self._problem_in_one_line():
            return self.finish(result)

    @contextlib.contextmanager
    def _problem_in_one_line(self) -> Iterator[None]:
        """Turns an error of TensorFlow or DALI into a UserError, with the record's name if it is known."""
        with bad_input_is_user_error(self.name, self.batches, self.done * self.own_images):
            try:
                yield
            except RuntimeError as error:  # a pipeline without TensorFlow around it
                if is_lost(error):
                    raise
                raise tf.errors.UnknownError(None, None, str(error)) from None


def measure(settings: Settings, options, dataset: Dataset, in_stages: bool) -> tuple[World, dict]:
    """Measures the stages of one worker, or the training steps of all workers. Collective: every rank must call it.

    options: those of experiments.benchmark. Returns (world, result): the content of benchmark.json, or `rows`, those of
    speed.json. Raises UserError.
    """
    recipe, launch = settings.recipe, settings.launch
    topology = options.topology and topologies.load(options.topology).in_precision(recipe.precision)
    launched = launcher.launched()
    nccl = worlds.has_nccl(launch.device)
    build.set_variables(settings)
    allreduce = allreduce_for(launch, launched.size, launched.local_size, nccl)
    exchange = build.make_exchange(launch, allreduce, nccl)
    world = worlds.start(recipe.seed, process_sets=exchange.process_sets, fusion_mb=launch.fusion_mb,
                         device=launch.device)
    world.agree(vars(recipe) | vars(launch) | vars(options), "the workers were started with different flags")
    worlds.check_gpus(world, launch.device_policy)
    dataset = build.stage_dataset(build.share_dataset(dataset, world), recipe, launch, world)
    sizes = options.global_batch_size or (world.size * options.micro_batch_size,)
    plans = [plan_of(recipe, size, options.micro_batch_size, world.size, dataset.train.samples, allreduce)
             for size in sizes]
    threads = options.dali_threads or (world.cores,)
    feeds = {count: build.make_feed(recipe, replace(launch, dali_threads=count), dataset, world) for count in threads}
    with contextlib.ExitStack() as held:
        with world.raise_on_all_ranks():
            state = build.make_state(settings, dataset)
            setups = [build.make_setup(settings, plan, world, feeds[threads[0]], state, exchange) for plan in plans]
            measured = stages(setups[0], feeds, held) if in_stages else training_steps(setups, held)
        take_turns(measured, options.seconds / ROUNDS, world)
        image_bytes = mean_size(measured[0]) if in_stages else None
    about = {name: getattr(recipe, name) for name in ("data_dir", "model", "augmentation", "precision")} | {
        "image_size": recipe.final_image_size, "device": "cpu" if world.gpu is None else "gpu"}
    if in_stages:
        rows = [{"name": stage.name, "images_per_second": stage.rate, "threads": stage.threads,
                 "megabytes_per_second": stage.rate * image_bytes / 1e6}
                for stage in sorted(measured, key=lambda stage: ORDER.index(stage.name))]
        return world, {"stages": rows, **speed.limit(rows, about["device"]), **about, "cores": world.cores,
                       "format": dataset.format, "dali_device": build.dali_device(launch.dali_device, world),
                       "micro_batch_size": options.micro_batch_size, "image_bytes": image_bytes}
    about |= {"compression": launch.compression, "workers": world.size, "workers_per_node": world.workers_per_node()}
    rows = [about | step_row(steps, plan, world) for steps, plan in zip(measured, plans, strict=True)]
    if topology and world.rank == 0:
        for row, setup in zip(rows, setups, strict=True):
            row |= {"topology": options.topology, "forecast_images_per_second": forecast(topology, setup)}
    return world, {"rows": rows}


def take_turns(measured: list[Measured], seconds: float, world: World) -> None:
    """Measures each in ROUNDS turns of this time."""
    for work in measured:
        work.warm_up(seconds, world)
    for _ in range(ROUNDS):
        for work in measured:
            wait_for_pipelines()
            work.turn()


def wait_for_pipelines(longest: float = 5.0) -> None:
    """Waits until all pipelines have filled their queues and this process's threads are idle."""
    end = time.perf_counter() + longest
    used = -1.0
    while time.perf_counter() < end and time.process_time() - used > 0.005:
        used = time.process_time()
        time.sleep(0.02)


def plan_of(recipe, global_batch_size: int, largest: int, workers: int, samples: int, allreduce) -> Plan:
    """Returns the plan for one batch size. Raises UserError if it is not divisible by the workers.

    largest: of a micro-batch.
    """
    per_worker = global_batch_size // workers
    micro_batch_size = max((size for size in divisors(per_worker) if size <= largest), default=None)
    return make_plan(replace(recipe, batch_size=Piecewise.parse(str(global_batch_size), int)),
                     None if global_batch_size % workers else micro_batch_size, workers, samples, allreduce)


def training_steps(setups: list[Setup], held: contextlib.ExitStack) -> list[Measured]:
    """Returns the training step of each setup. Their pipelines are open until `held` is closed."""
    made = []
    for setup in setups:
        [phase] = setup.plan.phases
        batches = held.enter_context(setup.feed.open(prepared(setup.feed, phase, setup.world.size), again=True))
        made.append(training_step(f"batch {phase.global_batch_size}", setup, batches))
        made[-1].times = StepTimes()
    return made


def stages(setup: Setup, feeds: dict[int, Feed], held: contextlib.ExitStack) -> list[Measured]:
    """Returns the stages in the order of their turns, `read` first. feeds: by number of threads."""
    [phase] = setup.plan.phases
    made = []
    for threads, feed in feeds.items():
        read = prepared(feed, phase, workers=1)
        batches = held.enter_context(feed.open(read, again=True))
        calls = {name: stage_call(*held.enter_context(feed.pipeline(read, until=name, again=True)), read.batch_size)
                 for name in STAGES}
        made += [Measured(name, call, batches, phase.global_batch_size, phase.global_batch_size, threads=threads)
                 for name, call in (calls | {"pipeline": batches.__next__}).items()]
        if len(made) == len(STAGES) + 1:  # the model's own speed does not depend on the threads
            made[-1].run(1)  # names a damaged record, which next() does not
            model = training_step("model", setup, Resident(next(batches)))
            model.ahead = 0
            made.append(model)
        made.append(replace(training_step("train", setup, batches), threads=threads))
    return made


def stage_call(pipeline, spool, batch_size: int) -> Callable:
    """Returns a function that runs a DALI pipeline once. spool: data.staging.spool.Spool, or None."""
    def run():
        if spool:
            spool.admit(batch_size)
        return pipeline.run()

    return run


def prepared(feed, phase: Phase, workers: int):
    """Prepares at most MOST_SAMPLES per worker of the training set, which are read repeatedly."""
    samples = min(feed.dataset.train.samples, MOST_SAMPLES * workers)
    steps = -(-samples // phase.global_batch_size)
    return feed.prepare([(0, steps)], phase.global_batch_size, phase.micro_batch_size)


def training_step(name: str, setup: Setup, batches: Batches | Resident) -> Measured:
    """Returns the updates of a setup. The learning rate is 0, so the weights do not change and stay finite."""
    [phase] = setup.plan.phases
    step = setup.train_step(phase)

    def update(timed: bool = False):
        batches.admit(phase.accumulation_steps)
        return step(batches.iterator, StepInput.of(0.0, setup.settings.recipe.momentum, timed))

    shapes = StepResult.shapes(len(setup.state.trained))
    return Measured(name, update, batches, phase.global_batch_size, phase.accumulation_steps * phase.micro_batch_size,
                    finish=lambda packed: StepResult.unpacked(packed.numpy(), shapes),
                    ahead=-(-AHEAD // phase.accumulation_steps))


def mean_size(read: Measured, batches: int = 32) -> float:
    """Returns the mean bytes per encoded image over some batches. read: the stage that only reads."""
    return statistics.fmean(shape[0] for _ in range(batches) for shape in read.call()[0].shape())


def step_row(steps: Measured, plan: Plan, world: World) -> dict:
    """Returns the measurement of one batch size. Collective: every rank must call it.

    compute, data, exchange: fractions of the time of a step.
    """
    [phase] = plan.phases
    return {"allreduce": plan.allreduce.allreduce, "grid": list(plan.allreduce.grid or (world.size, 1)),
            "global_batch_size": phase.global_batch_size, "micro_batch_size": phase.micro_batch_size,
            "accumulation_steps": phase.accumulation_steps, "step_seconds": phase.global_batch_size / steps.rate,
            "images_per_second": steps.rate, **breakdown_of(steps.times.gather(world))}


def forecast(topology, setup: Setup) -> float:
    """Returns the images per second that a topology forecasts for a setup."""
    plan, recipe = setup.plan, setup.settings.recipe
    [phase] = plan.phases
    model = model_cost(recipe.model, len(setup.feed.dataset.classes), recipe.final_image_size)
    work = topologies.StepWork.of(model, phase, recipe, topologies.BYTES[setup.settings.launch.compression])
    seconds = topology.step_seconds(work, plan.allreduce.grid or (plan.workers, 1), plan.allreduce.allreduce)
    return phase.global_batch_size / seconds
