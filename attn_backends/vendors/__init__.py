"""Adapters of vendor kernels: launches, what each can do, and its planning. Importing one imports no vendor package."""
