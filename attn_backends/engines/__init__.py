"""Plug-ins that put the backends inside engines. They import the library; nothing of the library imports them."""
