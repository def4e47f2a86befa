"""The one room that speaks to other processes: the launcher, the world of workers, the exchange of gradients."""
