"""Models that use `shardlib` and that it never imports."""
