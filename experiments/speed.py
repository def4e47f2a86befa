"""Measures the speed of training by global batch size on all workers of a launch, for experiments.benchmark.

The batch sizes take turns, so a drift of the machine affects all of them. A rate is the median over the turns. The
steps are those of train.py: its input pipeline, its exchange of gradients, its optimizer, with a learning rate of 0.
"""
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from data.feed import Batches
from distributed import launcher
from distributed import world as worlds
from distributed.world import World
from experiments.stage_times import AHEAD, MOST_SAMPLES, ROUNDS, errors_in_one_line, quiet
from launch import topology as topologies
from model_zoo.cost import model_cost
from optim.schedules import Piecewise
from training import build
from training.bad_input import bad_input_is_user_error
from training.breakdown import StepTimes, on_host
from training.plan import Phase, Plan, allreduce_for, divisors, make_plan
from training.step import Learned

TIMED = 2  # steps per turn whose waiting times are measured


@dataclass
class Batch:
    """A global batch size to measure.

    step: a compiled step of training. done: number of steps so far. steps: those of a turn. rates: images per second of
    each turn.
    """

    phase: Phase
    step: Callable
    batches: Batches
    momentum: float
    done: int = 0
    steps: int = 1
    times: StepTimes = field(default_factory=StepTimes)
    rates: list[float] = field(default_factory=list)

    def warm_up(self, seconds: float, world: World) -> None:
        """Compiles the step and chooses the number of steps of a turn, the same on all workers."""
        self._run(1)
        steps = max(1, round(seconds / self._run(1)))
        self.steps = world.broadcast(steps, "steps")

    def turn(self) -> None:
        """Consumes the prefetched batches, then measures some steps, and a few more for the breakdown."""
        self._run(-(-AHEAD // self.phase.accumulation_steps))
        self.rates.append(self.steps * self.phase.global_batch_size / self._run(self.steps))
        for _ in range(TIMED):
            began = time.perf_counter()
            waited = Learned.of(self._result(self._launch(timed=True))).waited
            self.times.add_timed(time.perf_counter() - began, waited)

    def _run(self, steps: int) -> float:
        """Runs steps, each launched before the result of the one before arrives. Returns the seconds."""
        began, packed = time.perf_counter(), self._launch()
        for _ in range(steps - 1):
            before, packed = packed, self._launch()
            self._result(before)
        self._result(packed)
        return time.perf_counter() - began

    def _launch(self, timed: bool = False) -> tf.Tensor:
        with self._bad_input_is_user_error():  # the rate is 0, so the weights do not change and stay finite
            packed = self.step(self.batches.iterator, tf.constant(0.0), tf.constant(self.momentum), on_host(timed))
        self.done += 1
        return packed

    def _result(self, packed: tf.Tensor) -> np.ndarray:
        with self._bad_input_is_user_error():
            return packed.numpy()

    def _bad_input_is_user_error(self):
        read = self.done * self.phase.accumulation_steps * self.phase.micro_batch_size
        return bad_input_is_user_error(f"batch {self.phase.global_batch_size}", self.batches, read, "--batch_size")


def measure(settings, options, dataset) -> tuple[World, list[dict]]:
    """Measures each of --global_batch_size. Returns (world, rows), the rows on rank 0.

    All workers have to call it at once. settings: training.settings.Settings. options: those of experiments.benchmark.
    Raises UserError.
    """
    recipe, launch = settings.recipe, settings.launch
    launched, nccl = launcher.launched(), worlds.has_nccl(launch.device)
    build.set_compiler(launch)
    allreduce = allreduce_for(launch, launched.size, launched.local_size, nccl)
    exchange = build.make_exchange(launch, allreduce, nccl)
    world = worlds.start(recipe.seed, process_sets=exchange.process_sets, fusion_mb=launch.fusion_mb,
                         device=launch.device)
    world.agree(vars(recipe) | vars(launch) | vars(options), "the workers were started with different flags")
    worlds.check_gpus(world, launch.device_policy)
    dataset = build.share_dataset(dataset, world)
    sizes = options.global_batch_size or (world.size * options.batch_size,)
    plans = [plan_of(recipe, size, options.batch_size, world.size, dataset.train.samples, allreduce) for size in sizes]
    with contextlib.ExitStack() as held:
        with world.raise_on_all_ranks(), errors_in_one_line():
            measured = list(opened(plans, settings, dataset, world, exchange, held))
        for one in measured:
            one.warm_up(options.seconds / ROUNDS, world)
        for _ in range(ROUNDS):
            for one in measured:
                quiet()
                one.turn()
        rows = [row(one, plan, world) for one, plan in zip(measured, plans, strict=True)]
    about = {"workers": world.size, "workers_per_node": world.workers_per_node(),
             "device": "cpu" if world.gpu is None else "gpu", "image_size": recipe.final_image_size,
             "compression": launch.compression} | {
        name: getattr(recipe, name) for name in ("data_dir", "model", "precision", "augmentation")}
    if world.rank > 0:
        return world, []
    forecasts = forecast(options.topology, settings, plans, len(dataset.classes))
    return world, [about | one | two for one, two in zip(rows, forecasts, strict=True)]


def plan_of(recipe, global_batch_size: int, largest: int, workers: int, samples: int, allreduce) -> Plan:
    """Returns the plan for one batch size. Raises UserError if it is not divisible by the workers.

    largest: of a micro-batch.
    """
    per_worker = global_batch_size // workers
    micro_batch_size = max((size for size in divisors(per_worker) if size <= largest), default=None)
    return make_plan(replace(recipe, batch_size=Piecewise.parse(str(global_batch_size), int)),
                     None if global_batch_size % workers else micro_batch_size, workers, samples, allreduce)


def opened(plans, settings, dataset, world, exchange, held: contextlib.ExitStack) -> Iterator[Batch]:
    """Builds the model once, and yields a Batch for each plan, whose pipeline is open until `held` is closed."""
    recipe = settings.recipe
    feed = build.make_feed(recipe, settings.launch, dataset, world)
    state = build.make_state(settings, dataset, world, exchange)
    for plan in plans:
        job = build.make_job(settings, plan, world, feed, state)
        [phase] = plan.phases
        steps = max(1, min(dataset.train.samples, MOST_SAMPLES * world.size) // phase.global_batch_size)
        batches = held.enter_context(feed.train(0, steps, phase.global_batch_size, phase.micro_batch_size))
        yield Batch(phase, job.train_step(phase), batches, recipe.momentum)


def row(measured: Batch, plan: Plan, world: World) -> dict:
    """Returns the measurement of one batch size. All workers have to call it at once.

    compute, data, exchange: fractions of the time of a step.
    """
    phase, rate = measured.phase, statistics.median(measured.rates)
    return {"allreduce": plan.allreduce.allreduce, "grid": list(plan.allreduce.grid or (world.size, 1)),
            "global_batch_size": phase.global_batch_size, "micro_batch_size": phase.micro_batch_size,
            "accumulation_steps": phase.accumulation_steps, "step_seconds": phase.global_batch_size / rate,
            "images_per_second": rate, **measured.times.collect(world)}


def forecast(name: str | None, settings, plans: list[Plan], classes: int) -> list[dict]:
    """Returns the forecast of --topology for each plan, or empty dicts without it."""
    if not name:
        return [{} for _ in plans]
    topology, recipe = topologies.load(name), settings.recipe
    model, rows = model_cost(recipe.model, classes, recipe.final_image_size), []
    for plan in plans:
        [phase] = plan.phases
        job = topologies.Job.of(model, phase.micro_batch_size, phase.accumulation_steps,
                                topologies.BYTES[settings.launch.compression], recipe.batch_norm_statistics == "moving")
        seconds = topology.step_seconds(job, plan.allreduce.grid or (plan.workers, 1), plan.allreduce.allreduce)
        rows.append({"topology": name, "forecast_images_per_second": phase.global_batch_size / seconds})
    return rows
