"""Brings data near: requests to a bucket, the window of fetched blocks, the spool that DALI follows, a local copy."""
