"""`python -m graphkv demo`: a small real model, decoded and judged. `session` runs it, the others serve it."""
