"""A hint, and what several hints ask about a command line."""
from dataclasses import dataclass

from plan.recipes import SMALL
from plan.settings import Settings

LEVELS = (
    "caveat",  # of a recipe, by whoever wrote it
    "warning",  # the result will be worse than it need be, or hours are lost
    "note",  # another way takes less time
    "advice")  # on a result
RATE = ("learning_rate", "lr_scaling", "base_batch_size", "trust_coefficient")
# A change of one of these needs another rate.
WITH_RATE = ("model", "pretrained", "pretrained_weights", "optimizer", "loss", "momentum", "lars_clip")


@dataclass(frozen=True)
class Hint:
    """What is wrong or better, and the flags that change it.

    level: one of LEVELS.
    text: in words, without a full stop. It leads up to the flags, if there are any.
    flags: what to add to the command line, such as ("--epochs=12",).
    """

    level: str
    text: str
    flags: tuple[str, ...] = ()

    def __str__(self):
        """Returns a line for the terminal."""
        return f"{self.level}: {self.words}"

    @property
    def words(self) -> str:
        return " ".join([self.text, *self.flags])

    @property
    def sentence(self) -> str:
        """The hint as an entry of `advice` in summary.json."""
        return f"{self.words[0].upper()}{self.words[1:]}."


def keeps(settings: Settings, *names: str) -> bool:
    """Whether these flags have the recipe's values."""
    return all(getattr(settings.recipe, name) == getattr(settings.source.recipe, name) for name in names)


def has_length(settings: Settings) -> bool:
    """Whether the recipe sets epochs and batch size. small_images.flags does so only as the default recipe."""
    return settings.source.is_default or settings.source.file.resolve() != SMALL.resolve()
