"""How do several processes serve one port? Not loaded where one does."""
