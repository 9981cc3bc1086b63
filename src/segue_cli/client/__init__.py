"""How does a person talk to a running server? The commands that ask it, steer it or stop it."""
