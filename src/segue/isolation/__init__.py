"""How is a sandbox made on this machine, and what is it held to? One file for each kind."""
