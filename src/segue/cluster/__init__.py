"""How do several worker processes act as one server? Not loaded where there is one."""
