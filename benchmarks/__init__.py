"""Benchmarks: what this library costs beside a vendor's own call, measured on the device in one process."""
