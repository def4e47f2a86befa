"""Which variables an optimizer excludes from weight decay and trust ratios, by the suffixes of their names."""


def is_excluded(variable, suffixes) -> bool:
    """Whether one of the suffixes ends a variable's name, as a whole word: `bias` ends `dense/bias` and `a_bias`."""
    name = variable.name.split(":")[0]
    return any(name == suffix or name.endswith(("/" + suffix, "_" + suffix)) for suffix in suffixes)


def check_exclusion(optimizer, variables) -> None:
    """Raises ValueError if `exclude` of an optimizer has suffixes, but no variable's name ends with one of them."""
    if optimizer.exclude and not any(is_excluded(variable, optimizer.exclude) for variable in variables):
        names = ", ".join(f"'{suffix}'" for suffix in optimizer.exclude)
        raise ValueError(f"{type(optimizer).__name__}: no variable name ends with a suffix in exclude: {names}")
