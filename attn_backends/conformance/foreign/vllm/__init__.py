"""vLLM's backends under the suite."""
