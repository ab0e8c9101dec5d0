"""Attachments to models of other libraries. None of them is imported by graphkv itself."""
