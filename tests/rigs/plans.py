"""Plans of recipes that are given flag by flag."""
from common.flags import parsed
from plan.flags import define
from plan.plan import make_plan
from plan.settings import Recipe

RECIPE = dict(
    batch_size="128", epochs=12.0, learning_rate="5", lr_scaling="none", base_batch_size=256,
    lr_schedule="poly", poly_power=2.0, lr_boundaries=[], warmup="none", warmup_epochs=0.0, warmup_learning_rate=0.0,
    decay_from="start", momentum=0.9, momentum_schedule="constant")


def plan(workers=1, samples=1437, micro_batch_size=None, elastic=False, **flags):
    values = define()
    for name, value in (RECIPE | flags).items():
        values[name].value = value
    return make_plan(parsed(values, Recipe), micro_batch_size, workers, samples, uneven=elastic)
