"""Is it allowed? Rules, a classifier in the process, or an endpoint for moderation; each is a `Guard`."""
