"""graphkv: the KV-cache runtime for decode loops that live inside CUDA graphs."""
