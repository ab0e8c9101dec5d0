"""Kernels of other libraries on graphkv's pools and metadata, each imported when it is chosen."""
