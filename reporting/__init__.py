"""Progress, metrics, TensorBoard and the report. They read what training passes to them and change nothing."""
