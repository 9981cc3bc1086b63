"""What does the operator see of turns that have ended? Metrics, traces, the audit log and log lines; never content."""
