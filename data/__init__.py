"""What is on disk, the order of samples, the DALI pipeline. Takes shards as numbers; knows nothing of Horovod."""
