"""Progress, metrics, TensorBoard, the report: reads what training hands it, changes nothing."""
