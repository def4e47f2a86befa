"""How long a training takes on CPUs, as far as its arithmetic tells."""
from common.errors import plural
from plan.settings import Recipe

CORE, PASSES = 20e9, 3  # assumed: multiply-adds per second of a core; an update is three forward passes


def cpu_time(recipe: Recipe, samples: float, multiply_adds: float, cores: int) -> str:
    """Returns a line with the time, rounded to minutes or hours, because the speed of a processor is only assumed.

    samples: number that it processes. multiply_adds: of a forward pass for one. cores: of all workers.
    """
    minutes = samples * (1 if recipe.freeze else PASSES) * multiply_adds / (CORE * cores) / 60
    time = f"{max(1, round(minutes))} min" if minutes < 60 else f"{round(minutes / 60):,} h"
    return f"forecast: about {time} on {plural(cores, 'CPU core')}"
