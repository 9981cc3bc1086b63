"""What do several processes owe each other? Not loaded where there is one."""
