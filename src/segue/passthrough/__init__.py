"""Which requests go to the engine as they came? Embeddings and plain completions, within the limits of the key."""
