"""What do clients of Chat Completions send and read? The same turn as the Responses API, in other words."""
