"""What can a person do from a terminal besides starting the server? One file for each command that `cli.py` names."""
