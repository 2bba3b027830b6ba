"""One claim per file: `python -m benchmarks.NAME --json` prints one line of JSON last."""
