"""Which kernel runs: where vendors' packages are, and what `auto` takes."""
