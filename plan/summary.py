"""A plan in words, for a person at a terminal."""
from common.errors import plural
from plan.plan import Plan, tidy
from plan.settings import Settings


def summary(settings: Settings, plan: Plan) -> list[str]:
    """Returns a plan in a few lines."""
    recipe, first = settings.recipe, plan.phases[0]
    sizes = ", ".join(map(str, recipe.image_size.values))
    lines = [f"model:         {recipe.model} at {sizes} pixels, {recipe.precision}",
             f"data:          {plan.train_samples:,} training images of {recipe.data_dir}",
             f"training:      {plural(plan.epochs, 'epoch')}, {plural(plan.steps, 'update')} with {recipe.optimizer}",
             f"learning rate: {plan.as_json()['peak_learning_rate']:g} at most, {recipe.lr_schedule}, "
             f"warm-up of {plural(tidy(recipe.warmup_epochs) if recipe.warmup != 'none' else 0, 'epoch')}",
             f"workers:       {plan.workers:,}, {'each ' * (plan.workers > 1)}with "
             f"{first.global_batch_size / first.workers:g} images per update",
             f"exchange:      {plan.allreduce.allreduce}"]
    for phase in plan.phases:
        lines.append(f"from epoch {phase.start_epoch:g}:".ljust(15) + f"batch {phase.global_batch_size:,} = "
                     f"{plural(phase.workers, 'worker')} x micro-batch {phase.micro_batch_size} x "
                     f"{phase.accumulation_steps}, {plural(phase.steps, 'update')}")
    return [*lines, *["time:          `python -m launch.scaling` forecasts a cluster's"] * bool(settings.run.workers)]
