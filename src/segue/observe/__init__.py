"""What does the operator see of turns that have ended? Metrics and log lines; never content."""
