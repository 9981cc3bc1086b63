"""A fleet on one machine: replicas that count prefix blocks, and the processes around them. Loaded by `segue fleet`."""
