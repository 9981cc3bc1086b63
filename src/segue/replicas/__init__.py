"""Which of the servers of an engine takes a job? Loaded where there are several, or several processes share one."""
