"""TOML files, validated: what `configs/backends` says of a backend, and errors that name file and key."""
