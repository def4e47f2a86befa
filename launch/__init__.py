"""Where a training runs: scripts that start it, binding of workers, checks of hosts, the forecast of the scaling."""
