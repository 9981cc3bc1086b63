"""How does a person look at it? One page without a build step, and one stream that keeps it up to date."""
