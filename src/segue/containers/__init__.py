"""How do clients make, see and delete containers and their files? Loaded only where there are sandboxes."""
