"""A module that can't be imported, as a vendor's may be."""

raise RuntimeError("no driver")
