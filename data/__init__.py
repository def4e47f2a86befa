"""Datasets on disk, the order of samples and the DALI pipeline. Shards are plain numbers; nothing here uses Horovod."""
