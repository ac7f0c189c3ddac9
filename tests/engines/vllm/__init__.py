"""vLLM's real engine on a CPU, with our backends inside (`make test-vllm`; docs/vllm.md)."""
