"""Is it allowed? Rules, a classifier in the process, or a moderation endpoint; each is a `Guard`."""
